"""Arcee and Nemotron: Llama's attention, and an MLP without a gate, whose activation is a squared relu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import SIZES, activation, rope
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import SequentialLayer
from skipjoin.model.ops.base import Norm
from skipjoin.model.self_attention import Rotary, separate_attention

# Names of the epsilon and its default, and the default share of a head that is rotated.
_NORMS = {"arcee": ("rms_norm_eps", 1e-5, 1.0), "nemotron": ("norm_eps", 1e-5, 0.5)}
_ARCHITECTURES = {"ArceeForCausalLM": "arcee", "NemotronForCausalLM": "nemotron"}


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    epsilon, usual, share = _NORMS[_ARCHITECTURES[architecture]]
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    head_dim, positions = int(raw.get("head_dim") or hidden // heads), int(raw.get("max_position_embeddings", 4096))
    bias = bool(raw.get("attention_bias", False))
    return {field: int(raw[name]) for field, name in SIZES.items()} | {
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "max_positions": positions,
        "norm_eps": float(raw.get(epsilon, usual)),
        "norm_offset": float(architecture == "NemotronForCausalLM"),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": activation(raw.get("hidden_act", "relu2")),
        "rope": rope(raw, head_dim, positions, share),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


@family("arcee", architectures=_ARCHITECTURES, fields=_fields, prefix="model.")
class ArceeDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> SequentialLayer:
        name = f"model.layers.{index}"
        attention = separate_attention(builder, index, f"{name}.self_attn", "o_proj", rotary=rotary)
        up, down = builder.mlp(f"{name}.mlp.up_proj", f"{name}.mlp.down_proj", builder.config.activation)
        norm = _norm(builder, f"{name}.input_layernorm")
        return SequentialLayer(norm, attention, _norm(builder, f"{name}.post_attention_layernorm"), up, down)

    @staticmethod
    def final_norm(builder: Builder) -> Norm:
        return _norm(builder, "model.norm")


def _norm(builder: Builder, name: str) -> Norm:
    config, width = builder.config, builder.config.hidden_size
    if not config.norm_offset:
        return builder.rms_norm(name)
    weight = builder.tensor(f"{name}.weight", width) + config.norm_offset
    return builder.ops.layer_norm(width, weight, builder.tensor(f"{name}.bias", width), config.norm_eps)
