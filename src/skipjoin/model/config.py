from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipjoin.model.config_fields import SIZES, check_numbers, check_sizes, dtype_name, token_ids
from skipjoin.model.errors import ModelError
from skipjoin.model.family import Family, find_architecture, find_whole
from skipjoin.model.gguf.file import is_gguf
from skipjoin.model.plugins import PluginError
from skipjoin.model.rope import RopeSettings
from skipjoin.model.settings_files import read_settings
from skipjoin.pooling import Task

# Tokens that compiled convolutions can read.
MAX_KERNEL = 16
_POSITIVE = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_positions",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSettings:
    """How experts are chosen by scores, to which the choice, but not the share, may add a correction of each expert.

    Attributes:
        squashes: Whether scores are logistic functions of the logits, not their softmax.
        corrects: Whether there are corrections.
        groups: Number of groups of neighbors, of which those `kept` have the largest sums of their `best` scores.
        sums_to_one: Whether shares are divided by their sum and `added`, before `scale` multiplies them.
    """

    squashes: bool = True
    corrects: bool = True
    groups: int = 1
    kept: int = 1
    best: int = 2
    sums_to_one: bool = True
    added: float = 1e-20
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSettings:
    """MLPs of which each token uses some, in `layers`; others have one of `intermediate_size`.

    Attributes:
        among_chosen: Whether shares are the softmax over the chosen experts' logits only.
        routing: How they are chosen if not by the largest logits.
    """

    count: int
    per_token: int
    width: int
    among_chosen: bool
    layers: tuple[int, ...]
    routing: RoutingSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputSettings:
    """An input of each layer for each token, of `width` numbers."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSettings:
    """Keys and values of all heads as products of one vector of `rank` numbers (DeepSeek-V2, section 2.1).

    Attributes:
        rotary_dim: Numbers of a key with positions, which all heads share; those without are `plain_dim` in each head.
        query_rank: Numbers of a vector of which queries are products, or 0.
    """

    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    query_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSettings:
    """A layer of a pooled vector: matrix [outputs, inputs] `linear.weight` of the safetensors `file`."""

    file: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSettings:
    """How the last hidden states of a text become its vector, or the score of a pair.

    Attributes:
        how: "cls" for the first token's state, "last" for the last one's, or "mean" of all.
        head: Layers between the hidden state and a score; None for embeddings.
        answers: Token ids of "yes" and "no", by whose logits a generating model judges pairs.
        squashes: Whether a score is the sigmoid of the head's value.
        max_tokens: Tokens that the model was trained for, if fewer than its positions.
    """

    task: Task
    how: str
    normalize: bool = False
    head: str | None = None
    head_bias: bool = True
    answers: tuple[int, ...] = ()
    squashes: bool = False
    max_tokens: int | None = None
    dense: tuple[DenseSettings, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """State of a request in the layers `layers`, which have no KV; all have the same.

    Attributes:
        kernel: Tokens that a causal convolution of `channels` channels reads; 1 without one.
        heads: Heads of a linear recurrence, each with a matrix of key_dim x value_dim; 0 without one.
        key_heads: Number of keys and queries, which divides `heads`.
    """

    layers: tuple[int, ...]
    kernel: int
    channels: int
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def layer_bytes(self, itemsize: int) -> tuple[int, int]:
        return (self.kernel - 1) * self.channels * itemsize, self.heads * self.key_dim * self.value_dim * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model, or of an encoder.

    Attributes:
        rope: Rotary positions, which decide the context; None if the model has others.
        ropes: Those of each layer, or None for a layer without positions.
        windows: Tokens that each layer attends to, the current one included, or on each side in encoders; 0 for all.
        attention_scale: Factor of attention scores; None for head_dim ** -0.5.
        attention_cap: Bound of scores s, which become cap * tanh(s / cap); 0 for none. So does `logit_cap` for logits,
            after `logit_scale`.
        residual_scale: Factor of what layers add.
        norm_offset: Added to the weights of root mean square norms.
        dtype_name: Type of the weights, or None if config.json leaves it to the weight files.
        embed_dim: Width of the token embedding: hidden_size except in OPT-350m and ELECTRA.
        is_encoder: Whether tokens attend to later ones too, so that a prompt is computed at once and keeps no KV.
        position_offset: First position of an encoder.
        distance_buckets: Embeddings of the distances of two tokens in one direction, up to `farthest`.
        layer_heads: KV heads and head width of each layer, where they differ; `num_kv_heads` and `head_dim` are the
            largest.
        rotates_pairs: Whether checkpoints rotate neighbors in a head.
        has_wide_mlps: Whether the MLPs of layers without KV of their own are twice as wide.
        key_is_value: Whether layers without a window have no projection of values.
        latent: How keys and values follow from one row of KV, which is both; it has the key with positions first.
        kv_sources: The layer whose KV each layer reads, where some layers have none of their own.
        chunks: Lengths of the chunks of a context within which some layers attend. Blocks must not lie in two.
        has_position_keys: Keys have their positions as numbers, so that KV must not be rounded.
        source: config.json as text, for transformers' modeling code; empty for native families.
    """

    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    activation: str
    rope: RopeSettings | None
    ropes: tuple[RopeSettings | None, ...]
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    dtype_name: str | None
    embed_dim: int
    attention_scale: float | None = None
    attention_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    norm_offset: float = 0.0
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    conv_bias: bool = False
    shared_width: int = 0
    state_bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    qk_norm: bool = False
    experts: ExpertSettings | None = None
    states: StateSettings | None = None
    norm_before: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    norm_bias: bool = True
    parallel_residual: bool = False
    is_encoder: bool = False
    type_vocab_size: int = 0
    position_offset: int = 0
    distance_buckets: int = 0
    farthest: int = 0
    pooling: PoolingSettings | None = None
    layer_heads: tuple[tuple[int, int], ...] = ()
    latent: LatentSettings | None = None
    kv_sources: tuple[int, ...] = ()
    rotates_pairs: bool = False
    has_wide_mlps: bool = False
    key_is_value: bool = False
    layer_inputs: LayerInputSettings | None = None
    chunks: tuple[int, ...] = ()
    has_position_keys: bool = False
    source: str = ""

    @property
    def vector_width(self) -> int:
        of = self.pooling
        if of is None or of.task is not Task.EMBED:
            return 1
        return of.dense[-1].outputs if of.dense else self.hidden_size

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return the number and width of a layer's KV heads."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    @property
    def has_plain_kv(self) -> bool:
        """Whether all layers have keys and values of the same heads."""
        return not self.layer_heads and self.latent is None

    @property
    def kv_rows(self) -> int:
        """Rows of a token in each head of KV: its key and value, or one that is both."""
        return 2 if self.latent is None else 1

    def kv_source(self, layer: int) -> int:
        return self.kv_sources[layer] if self.kv_sources else layer

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        folder = Path(path)
        if not folder.is_dir() and not is_gguf(folder):
            raise ModelError(f"{folder} is not a folder")
        raw = read_settings(folder, "config.json")
        eos = read_settings(folder, "generation_config.json", default={}).get("eos_token_id")
        try:
            return cls.from_dict(raw, extra_eos=eos)
        except ModelError as error:
            if is_gguf(folder):
                raise ModelError(f"{folder}, whose metadata make its config.json: {error}") from error
            raise

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, extra_eos: Any = None) -> ModelConfig:
        check_numbers(raw)
        raw = part_settings(raw, "thinker_config")
        names = raw.get("architectures") or []
        if not isinstance(names, list):
            raise ModelError(f"architectures in config.json must be a list of names, got {names!r:.80}")
        whole = raw
        try:
            architecture, family = find_architecture(names, raw.get("model_type"))
        except PluginError as error:
            if (found := _language_model(raw, names)) is None:
                raise ModelError(str(error)) from error
            architecture, family = found
            if not family.reads_whole:
                raw = {**raw, "text_config": _with_defaults(raw["text_config"])}
        raw = part_settings(raw, "text_config")
        check_sizes(raw, family.sizes)
        try:
            values = family.fields(whole if family.reads_whole else raw, architecture)
            if values.get("rope") is not None:
                values["max_positions"] = values["rope"].context(values["max_positions"])
            config = cls(architecture=architecture, family=family.name, **_common_fields(raw, values, extra_eos))
        except KeyError as error:
            raise ModelError(f"config.json of this {architecture} has no {error.args[0]!r}") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"config.json of this {architecture} cannot be read: {error}") from error
        config._check()
        return config

    def _check(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.states is not None:
            # Modeling code of transformers may have no attention.
            _check_states(self.states, self.num_layers, 0 if self.source else 1)
        if self.experts is not None and not 1 <= self.experts.per_token <= self.experts.count:
            raise ModelError(
                f"num_experts_per_tok in config.json must be in [1, {self.experts.count}], the number of experts, "
                f"got {self.experts.per_token}"
            )
        if self.experts is not None and (of := self.experts.routing) is not None:
            _check_groups(of, self.experts)


def _check_groups(of: RoutingSettings, experts: ExpertSettings) -> None:
    if of.groups == of.kept == 1:
        return
    size = experts.count // max(of.groups, 1)
    if not (1 <= of.kept <= of.groups and size * of.groups == experts.count and experts.per_token <= of.kept * size):
        raise ModelError(
            f"n_group and topk_group in config.json must divide {experts.count} experts into groups, of which those "
            f"kept have {experts.per_token}, got {of.groups} and {of.kept}"
        )


def _check_states(of: StateSettings, layers: int, least: int) -> None:
    if not 0 < len(of.layers) <= layers - least:
        raise ModelError(f"of {layers} layers, 1 to {layers - 1} must have attention, got {layers - len(of.layers)}")
    if not (2 <= of.kernel <= MAX_KERNEL or (of.heads and not of.channels)):
        raise ModelError(f"the convolutions in config.json must read 2 to {MAX_KERNEL} tokens, got {of.kernel}")
    if of.heads and (min(of.key_heads, of.key_dim, of.value_dim) < 1 or of.heads % of.key_heads):
        raise ModelError(f"{of.heads} heads of a recurrence cannot share {of.key_heads} keys evenly")


def _common_fields(raw: Mapping[str, Any], values: Mapping[str, Any], extra_eos: Any) -> dict[str, Any]:
    common: dict[str, Any] = {field: int(raw[name]) for field, name in SIZES.items() if field not in values}
    common |= values
    return {
        "eos_token_ids": tuple(dict.fromkeys([*token_ids(raw.get("eos_token_id")), *token_ids(extra_eos)])),
        "dtype_name": dtype_name(raw),
        "windows": (0,) * common["num_layers"],
        "ropes": (common["rope"],) * common["num_layers"],
        "embed_dim": common["hidden_size"],
    } | common


def part_settings(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the settings of a part with some of the whole's, or `raw` without such a part."""
    part = raw.get(name)
    if part is None:
        return raw
    if not isinstance(part, Mapping):
        raise ModelError(f"{name} in config.json must be an object, got {part!r:.80}")
    check_numbers(part)
    outer = ("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    return {**part, **{name: raw[name] for name in outer if raw.get(name) is not None}}


def _language_model(raw: Mapping[str, Any], names: list[Any]) -> tuple[str, Family] | None:
    """Return the architecture of the language model in one that also sees or hears, or None.

    If transformers runs that, it is the architecture of the whole, unless the part has a native family.
    """
    text, whole, part = raw.get("text_config"), find_whole(names, raw.get("model_type")), None
    is_part = whole is not None or any(str(name).endswith("ForConditionalGeneration") for name in names)
    if isinstance(text, Mapping) and is_part:
        with suppress(PluginError):
            part = find_architecture(list(text.get("architectures") or []), text.get("model_type"))
    if whole is None or part is None:
        return whole or part
    if not part[1].is_native:
        with suppress(ModelError):
            whole[1].fields(raw, whole[0])
            return whole
    return part


def _with_defaults(text: Mapping[str, Any]) -> dict[str, Any]:
    if SIZES["hidden_size"] in text:
        return dict(text)
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - takes seconds

    # As files have it: names of labels are numbers in Python.
    made: dict[str, Any] = json.loads(CONFIG_MAPPING[text["model_type"]]().to_json_string(use_diff=False))
    return {**made, **text}
