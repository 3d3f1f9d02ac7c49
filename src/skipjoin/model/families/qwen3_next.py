"""Qwen3-Next and Qwen3.5: three layers of a gated delta rule, then one of gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings, StateSettings
from skipjoin.model.config_fields import every
from skipjoin.model.errors import ModelError
from skipjoin.model.experts import expert_mlp, gated_experts
from skipjoin.model.families.gated import gated_fields, gated_mlp, norms_before
from skipjoin.model.families.lfm2 import mixed_kinds
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Layer
from skipjoin.model.ops.base import Linear
from skipjoin.model.recurrent import DeltaNet, GatedAttention, MixedLayer, Part, mlp_part, shared_experts
from skipjoin.model.self_attention import Rotary, SelfAttention

_ARCHITECTURES = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
# Of missing entries: those of the configuration classes in transformers.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_EXPERTS = {
    "qwen3_next": {"num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1, "num_key_value_heads": 2},
    "qwen3_5_moe": {"num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_key_value_heads": 2},
}
_SIZES = dict.fromkeys(_DEFAULTS, 1 << 16)


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = _ARCHITECTURES[architecture].removesuffix("_text")
    raw = {"norm_topk_prob": True, **_DEFAULTS, **_EXPERTS.get(kind, {"num_key_value_heads": 4}), **raw}
    has_experts = kind in _EXPERTS and int(raw["num_experts"]) > 0
    # Without dense layers, config.json need not say how wide they are.
    fields = gated_fields({"intermediate_size": raw["moe_intermediate_size"], **raw}, 0.25)
    if fields["activation"] != "silu":
        raise ModelError(f"hidden_act of {architecture} must be silu, got {raw['hidden_act']!r:.80}")
    if fields["attention_bias"]:
        raise ModelError(f"attention_bias of {architecture} must be false, got {raw['attention_bias']!r:.80}")
    layers, recurs = fields["num_layers"], every(raw["full_attention_interval"])
    has_state = [*map(recurs, range(layers))]
    if raw.get("layer_types") is not None:
        has_state = mixed_kinds(raw, layers, {"linear_attention": True, "full_attention": False})
    heads, keys = int(raw["linear_num_value_heads"]), int(raw["linear_num_key_heads"])
    key_dim, value_dim = int(raw["linear_key_head_dim"]), int(raw["linear_value_head_dim"])
    return fields | {
        "norm_offset": 1.0,
        "qk_norm": True,
        "states": StateSettings(
            layers=tuple(layer for layer in range(layers) if has_state[layer]),
            kernel=int(raw["linear_conv_kernel_dim"]),
            channels=2 * keys * key_dim + heads * value_dim,
            heads=heads,
            key_heads=keys,
            key_dim=key_dim,
            value_dim=value_dim,
        ),
        "experts": _experts(raw, layers) if has_experts else None,
        "shared_width": int(raw["shared_expert_intermediate_size"]) if has_experts else 0,
    }


def _experts(raw: Mapping[str, Any], layers: int) -> ExpertSettings:
    dense, is_skipped = raw.get("mlp_only_layers") or (), every(raw.get("decoder_sparse_step", 1))
    return ExpertSettings(
        count=int(raw["num_experts"]),
        per_token=int(raw["num_experts_per_tok"]),
        width=int(raw["moe_intermediate_size"]),
        among_chosen=bool(raw["norm_topk_prob"]),
        layers=tuple(layer for layer in range(layers) if layer not in dense and not is_skipped(layer)),
    )


@family(
    "qwen3_next",
    architectures=_ARCHITECTURES,
    fields=_fields,
    prefix="model.",
    sizes=_SIZES | {"decoder_sparse_step": 1 << 14, "shared_expert_intermediate_size": 1 << 24},
)
class Qwen3NextDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer:
        config, name = builder.config, f"model.layers.{index}"
        assert config.states is not None
        mixer: Part
        if index in config.states.layers:
            mixer = DeltaNet(builder, index, f"{name}.linear_attn", _entry(builder, f"{name}.linear_attn"))
        else:
            mixer = GatedAttention(builder, _attention(builder, index, f"{name}.self_attn", rotary))
        norm, mlp_norm = norms_before(builder, name)
        return MixedLayer(norm, mixer, mlp_norm, _mlp(builder, index, f"{name}.mlp"))


def _entry(builder: Builder, name: str) -> Linear:
    of, hidden = builder.config.states, builder.config.hidden_size
    assert of is not None
    values = of.heads * of.value_dim
    if builder.config.architecture != "Qwen3NextForCausalLM":
        names = [f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        return builder.linear(names, (of.channels, values, of.heads, of.heads), hidden, False)
    # Stored by key head: its query, its key, and values, gates, rates and decays of its heads.
    each = of.heads // of.key_heads
    orders = [
        _parts_first(of.key_heads, sizes)
        for sizes in ((of.key_dim, of.key_dim, each * of.value_dim, each * of.value_dim), (each, each))
    ]
    names, outs = [f"{name}.in_proj_qkvz", f"{name}.in_proj_ba"], (of.channels + values, 2 * of.heads)
    return builder.linear(names, outs, hidden, False, orders=orders)


def _parts_first(heads: int, sizes: tuple[int, ...]) -> torch.Tensor:
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])


def _attention(builder: Builder, index: int, name: str, rotary: Rotary | None) -> SelfAttention:
    config, hidden, dim = builder.config, builder.config.hidden_size, builder.config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    # Stored by head: its query and its gate.
    enter = builder.linear(
        [f"{name}.{part}_proj" for part in "qkv"],
        (2 * queries, keys, keys),
        hidden,
        False,
        orders=[_parts_first(config.num_heads, (dim, dim)), None, None],
    )
    leave = builder.linear(f"{name}.o_proj", (hidden,), queries, False)
    norms = builder.rms_norm(f"{name}.q_norm", dim), builder.rms_norm(f"{name}.k_norm", dim)
    return SelfAttention(builder, index, enter, leave, rotary=rotary, norms=norms)


def _mlp(builder: Builder, index: int, name: str) -> Part:
    of = builder.config.experts
    if of is None or index not in of.layers:
        return mlp_part(*gated_mlp(builder, name))
    experts = expert_mlp(builder, f"{name}.gate", gated_experts(builder, f"{name}.experts"))
    return shared_experts(builder, f"{name}.shared_expert", experts, f"{name}.shared_expert_gate")
