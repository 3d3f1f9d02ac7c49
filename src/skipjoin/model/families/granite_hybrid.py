"""Granite 4: Mamba-2 among layers of attention, with an MLP that all tokens use, and perhaps experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings, StateSettings
from skipjoin.model.errors import ModelError
from skipjoin.model.experts import expert_mlp, stacked_experts
from skipjoin.model.families.gated import (
    gated_attention,
    gated_fields,
    granite_scales,
    norms_before,
    residual_scale,
    shared_mlp,
)
from skipjoin.model.families.lfm2 import mixed_kinds
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Layer
from skipjoin.model.ops.base import GATED
from skipjoin.model.recurrent import Mamba2, MixedLayer, Part, SharedExperts, mlp_part
from skipjoin.model.self_attention import Rotary
from skipjoin.model.weights import Stack

# Of missing entries: those of the configuration class in transformers.
_DEFAULTS: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
_SIZES = {name: 1 << 20 for name in _DEFAULTS if name.startswith("mamba") and name != "mamba_d_head"}


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    raw = {**_DEFAULTS, **raw}
    fields = gated_fields(raw)
    layers, width = fields["num_layers"], int(raw["mamba_expand"]) * fields["hidden_size"]
    if fields["activation"] != "silu":
        raise ModelError(f"hidden_act of {architecture} must be silu, got {raw['hidden_act']!r:.80}")
    has_state = mixed_kinds({"layer_types": ["mamba"] * layers} | raw, layers, _KINDS)
    heads, groups, keys = (int(raw[f"mamba_{name}"]) for name in ("n_heads", "n_groups", "d_state"))
    dim = width // heads if raw["mamba_d_head"] == "auto" else int(raw["mamba_d_head"])
    if heads * dim != width:
        raise ModelError(
            f"mamba_n_heads x mamba_d_head must be {width}, mamba_expand x hidden_size, got {heads} x {dim}"
        )
    count, shared = int(raw["num_local_experts"] or 0), int(raw["shared_intermediate_size"])
    fields |= granite_scales(raw) | {
        "intermediate_size": shared,
        "mlp_bias": False,
        "conv_bias": bool(raw.get("mamba_conv_bias", True)),
        "state_bias": bool(raw.get("mamba_proj_bias", False)),
        "step_limits": _limits(raw.get("time_step_limit")),
        "states": StateSettings(
            layers=tuple(layer for layer in range(layers) if has_state[layer]),
            kernel=int(raw["mamba_d_conv"]),
            channels=width + 2 * groups * keys,
            heads=heads,
            key_heads=groups,
            key_dim=keys,
            value_dim=dim,
        ),
        "experts": ExpertSettings(
            count=count,
            per_token=int(raw["num_experts_per_tok"]),
            width=int(raw["intermediate_size"]),
            among_chosen=True,
            layers=tuple(range(layers)),
        )
        if count
        else None,
        "shared_width": shared,
    }
    if raw.get("position_embedding_type") != "rope":
        fields["ropes"] = (None,) * layers
    return fields


def _limits(given: Any) -> tuple[float, float]:
    """Return the least and most of Mamba-2's steps; transformers writes infinity as an object."""
    found = [0.0, math.inf] if given is None else given
    if isinstance(found, list):
        found = [
            float(number["__float__"]) if isinstance(number, Mapping) and len(number) == 1 else number
            for number in found
        ]
    if not (isinstance(found, list) and len(found) == 2 and all(isinstance(number, float | int) for number in found)):
        raise ModelError(f"time_step_limit in config.json must be two numbers, got {given!r:.80}")
    return float(found[0]), float(found[1])


@family(
    "granite_hybrid",
    architectures={"GraniteMoeHybridForCausalLM": "granitemoehybrid"},
    fields=_fields,
    prefix="model.",
    sizes=_SIZES | {"shared_intermediate_size": 1 << 24},
)
class GraniteHybridDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer:
        config, name, adjust = builder.config, f"model.layers.{index}", residual_scale(builder)
        assert config.states is not None
        mixer: Part
        if index in config.states.layers:
            mixer = Mamba2(
                builder, index, f"{name}.mamba", limits=config.step_limits, has_bias=config.state_bias, adjust=adjust
            )
        else:
            mixer = gated_attention(builder, index, rotary)
        (norm, mlp_norm), shared = norms_before(builder, name), shared_mlp(builder, f"{name}.shared_mlp")
        if (of := config.experts) is None:
            return MixedLayer(norm, mixer, mlp_norm, mlp_part(*shared))
        hidden, part = config.hidden_size, f"{name}.block_sparse_moe"
        make = stacked_experts(
            builder,
            Stack(f"{part}.input_linear.weight", of.count, 2 * of.width, hidden),
            Stack(f"{part}.output_linear.weight", of.count, hidden, of.width),
            GATED,
        )
        experts = expert_mlp(builder, f"{part}.router.layer", make)
        return MixedLayer(norm, mixer, mlp_norm, SharedExperts(builder, experts, shared, None))
