"""Gemma 4: heads of two widths, layers that read the KV of others, inputs of each layer by token, and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings, LayerInputSettings
from skipjoin.model.config_fields import cap, every, layer_kinds, rope, rope_of_kind
from skipjoin.model.errors import ModelError
from skipjoin.model.experts import expert_mlp, joined_experts
from skipjoin.model.families.gated import gate_of, gated_fields
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import advance
from skipjoin.model.modules import Adjusted, Embedding
from skipjoin.model.ops.base import Linear, Norm, Routed
from skipjoin.model.rope import RopeSettings
from skipjoin.model.self_attention import Rotary
from skipjoin.model.weights import Matrix

# Of missing entries: those of the configuration class in transformers.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
}
_UNIFIED = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
_ARCHITECTURES = {
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
}


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    raw = {**_DEFAULTS, **(_UNIFIED if architecture.startswith("Gemma4Unified") else {}), **raw}
    if raw.get("use_bidirectional_attention") == "all":
        raise ModelError(f"tokens of prompts of this {architecture} attend to later ones, which is not supported")
    fields = gated_fields({**raw, "hidden_act": raw["hidden_activation"], "rope_parameters": None})
    layers, positions = fields["num_layers"], fields["max_positions"]
    # The last layer attends to all tokens, as in transformers.
    slides = (*layer_kinds(raw, layers, every(6))[:-1], False)
    heads = [_heads_of(raw, str(layer), slide) for layer, slide in enumerate(slides)]
    for count, width in heads:
        if count < 1 or width < 1 or fields["num_heads"] % count:
            raise ModelError(f"{fields['num_heads']} attention heads cannot share {count} key-value heads of {width}")
    local = rope_of_kind(raw, "sliding_attention", "", 1e4)
    ropes = {
        (slide, width): rope(local, width, positions, 1.0) if slide else _rope_of_all(raw, width)
        for slide, (_, width) in zip(slides, heads, strict=True)
    }
    shared = int(raw["num_kv_shared_layers"])
    if not 0 <= shared < layers or any(slides[layer] not in slides[: layers - shared] for layer in range(layers)):
        raise ModelError(f"num_kv_shared_layers leaves no layer with KV of each kind in {layers} layers, got {shared}")
    last = {slide: layer for layer, slide in enumerate(slides[: layers - shared])}
    window = int(raw["sliding_window"] or 0)
    return fields | {
        "num_kv_heads": max(count for count, _ in heads),
        "head_dim": max(width for _, width in heads),
        "layer_heads": tuple(heads),
        "kv_sources": (*range(layers - shared), *(last[slide] for slide in slides[layers - shared :])),
        "qk_norm": True,
        "attention_scale": 1.0,
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "logit_cap": cap(raw, "final_logit_softcapping"),
        "rope": ropes[False, heads[-1][1]],
        "ropes": tuple(ropes[slide, width] for slide, (_, width) in zip(slides, heads, strict=True)),
        "windows": tuple(window * slide for slide in slides),
        "has_wide_mlps": bool(raw.get("use_double_wide_mlp")),
        "key_is_value": bool(raw.get("attention_k_eq_v")),
        "layer_inputs": LayerInputSettings(
            width=int(raw["hidden_size_per_layer_input"]), vocab_size=int(raw["vocab_size_per_layer_input"])
        )
        if raw["hidden_size_per_layer_input"]
        else None,
        "experts": ExpertSettings(
            count=int(raw["num_experts"]),
            per_token=int(raw["top_k_experts"]),
            width=int(raw["moe_intermediate_size"]),
            among_chosen=True,
            layers=tuple(range(layers)),
        )
        if raw.get("enable_moe_block")
        else None,
    }


def _heads_of(raw: Mapping[str, Any], layer: str, slides: bool) -> tuple[int, int]:
    """Return the number and width of a layer's KV heads, in either form of config.json."""
    count, width = raw["num_key_value_heads"], raw["head_dim"] if slides else raw["global_head_dim"]
    if not slides and raw.get("attention_k_eq_v"):
        count = raw["num_global_key_value_heads"] or count
    own = _object(_object(raw, "per_layer_config"), layer)  # of newer files
    return int(own.get("num_key_value_heads", count)), int(own.get("head_dim", width))


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{name} in config.json must be an object, got {value!r:.80}")
    return value


def _rope_of_all(raw: Mapping[str, Any], dim: int) -> RopeSettings:
    """Return the rotary settings of layers that attend to all tokens, in which only some pairs of a head turn."""
    nested = _object(_object(raw, "rope_parameters"), "full_attention") or {"partial_rotary_factor": 0.25}
    kind, share = nested.get("rope_type", "proportional"), float(nested.get("partial_rotary_factor", 1.0))
    if kind != "proportional" or not 0 < share <= 1 or nested.get("factor", 1.0) != 1.0:
        raise ModelError(f"rope_parameters of full_attention must be proportional without a factor, got {nested!r:.80}")
    turning = int(share * dim // 2)
    return RopeSettings(
        theta=float(nested.get("rope_theta", 1e6)),
        rotary_dim=dim,
        scaling="factors",
        # Positions do not turn the others.
        factors=(1.0,) * turning + (math.inf,) * (dim // 2 - turning),
    )


class _Shared:
    """What layers of a pass read: inputs by token, [T, layers, width], and keys and values of other layers."""

    def __init__(self) -> None:
        self.inputs: torch.Tensor | None = None
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@family(
    "gemma4",
    architectures=_ARCHITECTURES,
    fields=_fields,
    prefix="model.",
    sizes={
        "global_head_dim": 1 << 16,
        "num_global_key_value_heads": 1 << 16,
        "hidden_size_per_layer_input": 1 << 16,
        "vocab_size_per_layer_input": 1 << 24,
        "num_kv_shared_layers": 1 << 14,
        "top_k_experts": 1 << 12,
    },
)
class Gemma4Decoder(RotaryDecoder):
    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        self._shared = _Shared()
        super().__init__(builder, device)
        of = builder.config.layer_inputs
        self._inputs = None if of is None else _LayerInputs(builder, of)

    def layer(self, builder: Builder, index: int, rotary: Rotary | None) -> Gemma4Layer:  # type: ignore[override]
        return Gemma4Layer(builder, index, rotary, self._shared)

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        shared = self._shared
        shared.inputs = None if self._inputs is None else self._inputs(step.batch.token_ids, x)
        try:
            return advance(self._layers, x, step)
        finally:
            shared.inputs, shared.kv = None, {}


class _LayerInputs:
    """Inputs of each layer: the token's own embedding of it, and a projection of the token's embedding."""

    def __init__(self, builder: Builder, of: LayerInputSettings) -> None:
        config = builder.config
        self._width, self._hidden = of.width, config.hidden_size
        numbers, rows = config.num_layers * self._width, range(of.vocab_size)
        matrix = Matrix("model.embed_tokens_per_layer", len(rows), rows)
        table = builder.weights.table(builder.ops, matrix, numbers)
        builder.weight_bytes += table.nbytes if isinstance(table, torch.Tensor) else table.weight_bytes
        self._embedding = Embedding(table, rows, len(rows), builder.group, math.sqrt(self._width))
        self._project = builder.linear("model.per_layer_model_projection", (numbers,), self._hidden, False)
        self._norm = builder.rms_norm("model.per_layer_projection_norm", self._width)

    def __call__(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shape = len(x), -1, self._width
        projected = self._norm(self._project(x).mul_(self._hidden**-0.5).view(shape))
        return projected.add_(self._embedding(ids).view(shape)).mul_(math.sqrt(0.5))


class Gemma4Attention:
    def __init__(self, builder: Builder, index: int, rotary: Rotary | None, shared: _Shared) -> None:
        config, name = builder.config, f"model.layers.{index}.self_attn"
        self._kv_heads, self._dim = config.heads_of(index)
        self._heads, self._shared, self._source = config.num_heads, shared, config.kv_source(index)
        has_kv = self._source == index
        self._is_read = config.kv_sources.count(index) > 1
        self._slot = builder.shard.kv_layers(config).index(self._source)
        self._window, self._cos_sin = config.windows[index], None if rotary is None else rotary.cos_sin
        key_is_value = config.key_is_value and not self._window
        parts = "q" + "kv"[: has_kv * (2 - key_is_value)]
        numbers = [(self._heads if part == "q" else self._kv_heads) * self._dim for part in parts]
        names, hidden = [f"{name}.{part}_proj" for part in parts], config.hidden_size
        self._enter = builder.linear(names, numbers, hidden, config.attention_bias)
        weights = [builder.tensor(f"{name}.{part}_norm.weight", self._dim) for part in "qk"[: 1 + has_kv]]
        weights.append(torch.ones_like(weights[0]))
        self._norms = [builder.ops.rms_norm(weight, config.norm_eps) for weight in weights]
        leave = builder.linear(f"{name}.o_proj", (hidden,), self._heads * self._dim, config.attention_bias)
        self._leave = Adjusted(leave, builder.rms_norm(f"model.layers.{index}.post_attention_layernorm"))

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm) -> torch.Tensor:
        heads = self._enter(x).view(len(x), -1, self._dim)
        query = self._norms[0](heads[:, : self._heads])
        if self._source in self._shared.kv:
            key, value = self._shared.kv[self._source]
        else:
            key, value = heads[:, self._heads :][:, : self._kv_heads], heads[:, -self._kv_heads :]
            key, value = self._norms[1](key), self._norms[2](value)
            if self._is_read:
                self._shared.kv[self._source] = key, value
        if self._source in self._shared.kv:
            # Attention rotates keys in place, and writes those of another layer once more, with the same bits.
            key = key.clone()
        out = step.attention.attend(
            query, key, value, step.kv, step.batch,
            layer=self._slot, scale=1.0, window=self._window, cos_sin=self._cos_sin,
        )  # fmt: skip
        return self._leave.add_to(out, total, then)


class _Experts:
    """Experts beside an MLP; each expert's share has a factor of its own."""

    def __init__(self, builder: Builder, name: str) -> None:
        config, settings = builder.config, builder.config.experts
        assert settings is not None
        of = expert_mlp(builder, f"{name}.router.proj", joined_experts(builder, f"{name}.experts", gate_of(config)))
        self._router, self._experts = of.router, of.experts
        scale = builder.tensor(f"{name}.router.scale", config.hidden_size).float() * config.hidden_size**-0.5
        self._router_norm = builder.ops.rms_norm(scale.to(builder.dtype), config.norm_eps)
        self._factors = builder.tensor(f"{name}.router.per_expert_scale", settings.count).float()
        self._before = builder.rms_norm(f"{name}.pre_feedforward_layernorm_2")
        self._after = builder.rms_norm(f"{name}.post_feedforward_layernorm_2")
        self._after_mlp = builder.rms_norm(f"{name}.post_feedforward_layernorm_1")

    def __call__(self, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        routed = self._experts.route(self._router(self._router_norm(x)))
        routed = Routed(routed.chosen, routed.shares * self._factors[routed.chosen])
        found = self._experts.add_to(self._before(x), routed, torch.zeros_like(x))
        return self._after_mlp(product).add_(self._after(found))


class Gemma4Layer:
    def __init__(self, builder: Builder, index: int, rotary: Rotary | None, shared: _Shared) -> None:
        config, name = builder.config, f"model.layers.{index}"
        self.norm = builder.rms_norm(f"{name}.input_layernorm")
        self._attention = Gemma4Attention(builder, index, rotary, shared)
        self._mlp_norm = builder.rms_norm(f"{name}.pre_feedforward_layernorm")
        self._after = builder.rms_norm(f"{name}.post_feedforward_layernorm")
        hidden, width = config.hidden_size, config.intermediate_size
        if config.has_wide_mlps and config.kv_source(index) != index:
            width *= 2
        gate_up = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self._up = builder.linear(gate_up, (width, width), hidden, False, activation=gate_of(config))
        self._down = builder.linear(f"{name}.mlp.down_proj", (hidden,), width, False)
        self._experts = None if config.experts is None else _Experts(builder, name)
        self._index, self._shared = index, shared
        self._input: tuple[Linear, Linear, Norm] | None = None
        if (of := config.layer_inputs) is not None:
            activation = config.activation
            enter = builder.linear(f"{name}.per_layer_input_gate", (of.width,), hidden, False, activation=activation)
            leave = builder.linear(f"{name}.per_layer_projection", (hidden,), of.width, False)
            self._input = enter, leave, builder.rms_norm(f"{name}.post_per_layer_input_norm")
        self._scale = builder.tensor(f"{name}.layer_scalar", 1)

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        normed = self._attention.add_to(normed, x, step, self._mlp_norm)
        product = self._down(self._up(normed))
        if self._experts is not None:
            product = self._experts(x, product)
        x.add_(self._after(product))
        if self._input is not None:
            assert self._shared.inputs is not None
            enter, leave, norm = self._input
            x.add_(norm(leave(enter(x).mul_(self._shared.inputs[:, self._index]))))
        x.mul_(self._scale)
        return x if then is None else then(x)
