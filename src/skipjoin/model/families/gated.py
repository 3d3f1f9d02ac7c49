from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from skipjoin.model.builder import Builder
from skipjoin.model.config import ModelConfig
from skipjoin.model.config_fields import SIZES, activation, factor, rope
from skipjoin.model.errors import ModelError
from skipjoin.model.layers import SequentialLayer
from skipjoin.model.modules import Adjusted, Unchanged
from skipjoin.model.ops.base import GATED, GATES, HeadNorm, Linear, Norm
from skipjoin.model.self_attention import Rotary, SelfAttention, separate_attention

_GATES = {function: name for name, function in GATES.items()}


def gated_fields(raw: Mapping[str, Any], share: float = 1.0) -> dict[str, Any]:
    sizes: dict[str, Any] = {field: int(raw[name]) for field, name in SIZES.items()}
    head_dim = int(raw.get("head_dim") or sizes["hidden_size"] // sizes["num_heads"])
    max_positions, bias = int(raw["max_position_embeddings"]), bool(raw.get("attention_bias", False))
    return sizes | {
        "num_kv_heads": int(raw.get("num_key_value_heads") or sizes["num_heads"]),
        "head_dim": head_dim,
        "max_positions": max_positions,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": gate_function(raw.get("hidden_act", "silu")),
        "rope": rope(raw, head_dim, max_positions, share),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def granite_scales(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_scale": factor(raw, "attention_multiplier", 1.0),
        "embedding_scale": factor(raw, "embedding_multiplier", 1.0),
        "residual_scale": factor(raw, "residual_multiplier", 1.0),
        "logit_scale": 1 / factor(raw, "logits_scaling", 1.0),
    }


def gate_function(name: str) -> str:
    if (found := activation(name)) not in _GATES:
        raise ModelError(f"activation {name!r} is not supported in gated layers, only {' and '.join(_GATES)} are")
    return found


def gate_of(config: ModelConfig) -> str:
    return _GATES[config.activation]


class LayerNorms(NamedTuple):
    attention: str | None = "input_layernorm"
    after_attention: str | None = None
    mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


BEFORE_PARTS = LayerNorms()


def gated_layer(
    builder: Builder,
    index: int,
    rotary: Rotary | None,
    names: LayerNorms = BEFORE_PARTS,
    *,
    has_joined_projections: bool = False,
    has_joined_gate: bool = False,
    has_projection_norms: bool = False,
    is_paired: bool = False,
) -> SequentialLayer:
    """Make a layer; with `has_projection_norms`, norms of queries and keys are over all heads instead of each."""
    name = f"model.layers.{index}"
    before, after = (
        [builder.rms_norm(f"{name}.{of}") if of else None for of in part]
        for part in ((names.attention, names.mlp), (names.after_attention, names.after_mlp))
    )
    attention = gated_attention(
        builder,
        index,
        rotary,
        has_projection_norms=has_projection_norms,
        adjust=after[0],
        joined="qkv_proj" if has_joined_projections else "",
        is_paired=is_paired,
    )
    up, down = gated_mlp(builder, f"{name}.mlp", is_joined=has_joined_gate)
    if (adjust := after[1] or residual_scale(builder)) is not None:
        down = Adjusted(down, adjust)
    return SequentialLayer(before[0] or Unchanged(), attention, before[1] or Unchanged(), up, down)


def gated_attention(
    builder: Builder,
    index: int,
    rotary: Rotary | None,
    *,
    has_projection_norms: bool = False,
    adjust: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **options: Any,
) -> SelfAttention:
    name = f"model.layers.{index}.self_attn"
    norms = _query_key_norms(builder, name, over_all_heads=has_projection_norms)
    adjust = adjust or residual_scale(builder)
    return separate_attention(builder, index, name, "o_proj", rotary=rotary, norms=norms, adjust=adjust, **options)


def gated_mlp(builder: Builder, name: str, *, is_joined: bool = False, begins: bool = True) -> tuple[Linear, Linear]:
    up = f"{name}.gate_up_proj" if is_joined else [f"{name}.gate_proj", f"{name}.up_proj"]
    return builder.mlp(up, f"{name}.down_proj", gate_of(builder.config), is_joined=is_joined, begins=begins)


def norms_before(builder: Builder, name: str) -> tuple[Norm, Norm]:
    return builder.rms_norm(f"{name}.input_layernorm"), builder.rms_norm(f"{name}.post_attention_layernorm")


def shared_mlp(builder: Builder, name: str) -> tuple[Linear, Linear]:
    """Return the MLP that all tokens of Granite's layers use."""
    up, down = builder.mlp(f"{name}.input_linear", f"{name}.output_linear", GATED, is_joined=True)
    adjust = residual_scale(builder)
    return up, down if adjust is None else Adjusted(down, adjust)


def residual_scale(builder: Builder) -> Callable[[torch.Tensor], torch.Tensor] | None:
    scale = builder.config.residual_scale
    return None if scale == 1 else lambda product: product.mul_(scale)


def _query_key_norms(builder: Builder, name: str, *, over_all_heads: bool) -> tuple[HeadNorm, HeadNorm] | None:
    config, shard = builder.config, builder.shard
    if not config.qk_norm:
        return None
    if not over_all_heads:
        return builder.rms_norm(f"{name}.q_norm", config.head_dim), builder.rms_norm(f"{name}.k_norm", config.head_dim)
    dim = config.head_dim
    return (
        builder.projection_norm(f"{name}.q_norm", shard.query_rows(config), config.num_heads * dim),
        builder.projection_norm(f"{name}.k_norm", shard.kv_rows(config), config.num_kv_heads * dim),
    )
