"""Parts of encoders, whose tokens attend to all tokens of their text, or of a window around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import AttentionBackend, Call, Heads, LayerInputs
from skipjoin.model.batch import PackedBatch
from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import activation
from skipjoin.model.family import ReadFields, family
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.modules import Embedding
from skipjoin.model.ops.base import GATES, LayerOps, Linear, Norm, WholeText
from skipjoin.model.self_attention import Rotary, rotaries

_GATED = {function: name for name, function in GATES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of an encoder's tensors, after the model's prefix; those of a layer follow `layer`, too.

    Attributes:
        positions: Learned position embeddings; empty if the encoder has none.
        qkv: Names of three matrices, or of one that joins them.
        attention_norm: Norm after the attention, or before it if `norm_before`; `mlp_norm` likewise.
        up: First matrices of the MLP: one without a gate, or gate and up. If `is_joined`, one matrix has both, with up
            first if `has_up_first`.
        has_down_bias: Whether the second matrix of the MLP has a bias although `mlp_bias` is false for the first.
    """

    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"
    projection: str = "embeddings_project"
    layer: str = "encoder.layer.{}"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""
    is_joined: bool = False
    has_up_first: bool = False
    has_down_bias: bool = False


def encoder_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of encoders with biases, and with norms after each part."""
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    return {
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "norm_eps": float(raw["layer_norm_eps"]),
        "tie_embeddings": True,
        "activation": activation(raw.get("hidden_act", "gelu")),
        "rope": None,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "norm_before": False,
        "is_encoder": True,
    }


class EncoderLayer:
    def __init__(self, builder: Builder, index: int, name: str, names: Layout, rotary: Rotary | None) -> None:
        config, shard = builder.config, builder.shard
        hidden, width, inner = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        own, columns = shard.query_rows(config), shard.columns(config)
        self._heads, self._dim = len(shard.heads(config)), config.head_dim
        self._ops, self._is_before = builder.ops, config.norm_before
        self._whole = WholeText(self._dim**-0.5, config.windows[index], None if rotary is None else rotary.cos_sin)
        is_one = len(names.qkv) == 1
        self._qkv = builder.linear(
            [f"{name}.{part}" for part in (names.qkv * 3 if is_one else names.qkv)],
            [3 * inner if is_one else inner] * 3,
            hidden,
            config.attention_bias,
            rows=[_moved(own, part * inner if is_one else 0) for part in range(3)],
        )
        self._out = builder.summed_linear(f"{name}.{names.out}", hidden, inner, config.output_bias, columns=own)
        has_norm = not (self._is_before and index == 0)  # the embeddings' norm comes before the first layer
        self._norm = encoder_norm(builder, f"{name}.{names.attention_norm}", hidden) if has_norm else None
        self._up: Linear | _Gate
        if len(names.up) == 1 and not names.is_joined:
            self._up = builder.linear(
                f"{name}.{names.up[0]}",
                (width,),
                hidden,
                config.mlp_bias,
                rows=(columns,),
                activation=config.activation,
            )
        else:
            self._up = _gated(builder, name, names)
        has_bias = config.mlp_bias or names.has_down_bias
        self._down = builder.summed_linear(f"{name}.{names.down}", hidden, width, has_bias, columns=columns)
        self._mlp_norm = encoder_norm(builder, f"{name}.{names.mlp_norm}", hidden)

    def __call__(self, x: torch.Tensor, batch: PackedBatch, by_distance: torch.Tensor | None) -> torch.Tensor:
        normed = self._norm(x) if self._is_before and self._norm is not None else x
        heads = Heads(*self._qkv(normed).view(len(x), 3, self._heads, self._dim).unbind(1))
        attended = self.attend(heads, batch, by_distance)
        if self._is_before:
            normed = self._out.add_to(attended, x, self._mlp_norm)
            return self._down.add_to(self._up(normed), x)
        x = self._out.add_to(attended, x, self._norm)
        return self._down.add_to(self._up(x), x, self._mlp_norm)

    def attend(self, heads: Heads, batch: PackedBatch, by_distance: torch.Tensor | None) -> torch.Tensor:
        return self._ops.attend_whole(heads, batch, self._whole._replace(by_distance=by_distance))


class Encoder:
    PREFIX: str
    EMBEDDING: str
    LAYOUT = Layout()
    LAYER = EncoderLayer
    OUTPUT = ""
    # As of `WholeText`.
    by_distance: torch.Tensor | None = None

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        config, shard, names = builder.config, builder.shard, self.LAYOUT
        self.embedding: Embedding | None = None
        self._positions = self._types = self._projection = None
        if shard.is_first:
            self.embedding = builder.embedding(self.EMBEDDING)
            self._offset = config.position_offset
            if config.rope is None and names.positions:
                stored = config.max_positions + self._offset
                self._positions = builder.tensor(f"{self._name(names.positions)}.weight", stored, config.embed_dim)
            if count := config.type_vocab_size:
                types = builder.tensor(f"{self._name(names.types)}.weight", count, config.embed_dim)
                # A model with one type has no other for the second text of a pair.
                self._types = types.expand(max(2, count), -1) if count == 1 else types
            self._norm = encoder_norm(builder, self._name(names.norm), config.embed_dim)
            if config.embed_dim != config.hidden_size:
                self._projection = builder.linear(
                    self._name(names.projection), (config.hidden_size,), config.embed_dim, True, takes_adapters=False
                )
        self._layers = [
            self.LAYER(builder, index, self._name(names.layer.format(index)), names, rotary)
            for index, rotary in rotaries(builder, device).items()
        ]
        self._final = (
            encoder_norm(builder, self._name(names.final_norm), config.hidden_size) if names.final_norm else None
        )

    def _name(self, name: str) -> str:
        return f"{self.PREFIX}.{name}"

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        assert self.embedding is not None  # on the first stage
        x = self.embedding(batch.token_ids)
        if self._types is not None:
            x = x + (self._types[0] if batch.types is None else F.embedding(batch.types, self._types))
        if self._positions is not None:
            x = x + F.embedding(batch.positions + self._offset, self._positions)
        x = self._norm(x)
        return x if self._projection is None else self._projection(x)

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        for layer in self._layers:
            x = layer(x, step.batch, self.by_distance)
        return x

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._final is None else self._final(hidden)


class _Gate:
    """Gate and up of an MLP with exact gelu, for which operations have no product of both."""

    def __init__(self, gate: Linear, up: Linear) -> None:
        self._gate, self._up = gate, up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate(x).mul_(self._up(x))


def _gated(builder: Builder, name: str, names: Layout) -> Linear | _Gate:
    config, own = builder.config, builder.shard.columns(builder.config)
    width = config.intermediate_size
    parts, rows = [f"{name}.{part}" for part in names.up], [own, own]
    if names.is_joined:
        parts *= 2
        rows = [_moved(own, width * (names.has_up_first ^ part)) for part in (False, True)]
    outs = [2 * width if names.is_joined else width] * 2
    if (fused := _GATED.get(config.activation)) is not None:
        return builder.linear(parts, outs, config.hidden_size, config.mlp_bias, rows=rows, activation=fused)
    gate, up = (
        builder.linear(part, (out,), config.hidden_size, config.mlp_bias, rows=(of,), activation=function)
        for part, out, of, function in zip(parts, outs, rows, (config.activation, None), strict=True)
    )
    return _Gate(gate, up)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def encoder_norm(builder: Builder, name: str, width: int) -> Norm:
    config = builder.config
    shift = builder.tensor(f"{name}.bias", width) if config.norm_bias else None
    return builder.ops.layer_norm(width, builder.tensor(f"{name}.weight", width), shift, config.norm_eps)


EncoderT = TypeVar("EncoderT", bound=type[Encoder])
OUTPUTS = ("Model", "ForMaskedLM", "ForSequenceClassification")
_SIZES = {"type_vocab_size": 1 << 10}


def encoder_family(
    name: str, fields: ReadFields, sizes: Mapping[str, int] = _SIZES, **kinds: str
) -> Callable[[EncoderT], EncoderT]:
    """Register a class of encoders as `family` does; `kinds` are types by the beginning of architectures' names."""

    def register(encoder: EncoderT) -> EncoderT:
        encoder.EMBEDDING = f"{encoder.PREFIX}.{encoder.LAYOUT.words}.weight"
        named = {f"{start}{output}": kind for start, kind in kinds.items() for output in OUTPUTS}
        return family(name, architectures=named, fields=fields, prefix=f"{encoder.PREFIX}.", sizes=sizes)(encoder)

    return register


class WholeAttention(AttentionBackend):
    """Attention of decoders whose tokens also attend to later ones, which keep no KV."""

    name = "whole"

    def __init__(self, ops: LayerOps) -> None:
        self._ops = ops

    def run(self, heads: Heads, kv: PagedKV, batch: PackedBatch, call: Call) -> torch.Tensor:
        if call.norms is not None:
            heads = Heads(*call.norms(heads.query, heads.key), heads.value)
        return self._ops.attend_whole(heads, batch, WholeText(call.softmax.scale, call.window, call.cos_sin))
