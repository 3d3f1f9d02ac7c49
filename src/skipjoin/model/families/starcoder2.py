"""StarCoder2: rotary positions, grouped-query attention, layer norms and an ungated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import activation, rope
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import SequentialLayer
from skipjoin.model.ops.base import Norm
from skipjoin.model.self_attention import Rotary, separate_attention


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads, hidden, layers = (int(raw[name]) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    max_positions = int(raw["max_position_embeddings"])
    bias = bool(raw.get("use_bias", True))
    return {
        "num_kv_heads": int(raw.get("num_key_value_heads", 2)),
        "head_dim": hidden // heads,
        "max_positions": max_positions,
        "norm_eps": float(raw.get("norm_epsilon", 1e-5)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "activation": activation(raw.get("hidden_act", "gelu_pytorch_tanh")),
        "rope": rope(raw, hidden // heads, max_positions, 1.0),
        "windows": (int(raw.get("sliding_window") or 0),) * layers,
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
    }


@family("starcoder2", architectures={"Starcoder2ForCausalLM": "starcoder2"}, fields=_fields, prefix="model.")
class Starcoder2Decoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> SequentialLayer:
        name = f"model.layers.{index}"
        attention = separate_attention(builder, index, f"{name}.self_attn", "o_proj", rotary=rotary)
        up, down = builder.mlp(f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", builder.config.activation)
        norm = builder.layer_norm(f"{name}.input_layernorm")
        return SequentialLayer(norm, attention, builder.layer_norm(f"{name}.post_attention_layernorm"), up, down)

    @staticmethod
    def final_norm(builder: Builder) -> Norm:
        return builder.layer_norm("model.norm")
