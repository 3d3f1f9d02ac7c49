"""StarCoder2: rotary positions, grouped-query attention, layer norms and an ungated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.config import activation, rope
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Builder, LayerInputs, Rotary, SelfAttention
from skipjoin.model.ops.base import Norm


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads, hidden, layers = (int(raw[name]) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    max_positions = int(raw["max_position_embeddings"])
    bias = bool(raw.get("use_bias", True))
    return {
        "num_layers": layers,
        "num_kv_heads": int(raw.get("num_key_value_heads", 2)),
        "head_dim": hidden // heads,
        "intermediate_size": int(raw["intermediate_size"]),
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


@family(
    "starcoder2",
    architectures={
        "Starcoder2ForCausalLM": "starcoder2",
    },
    fields=_fields,
    prefix="model.",
)
class Starcoder2Decoder(RotaryDecoder):
    EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        super().__init__(builder, device, _Starcoder2Layer, lambda: builder.layer_norm("model.norm"))


class _Starcoder2Layer:
    def __init__(self, builder: Builder, index: int, rotary: Rotary) -> None:
        config, shard, name = builder.config, builder.shard, f"model.layers.{index}"
        hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        own_q, own_kv, columns = shard.query_rows(config), shard.kv_rows(config), shard.columns(config)
        projections = [f"{name}.self_attn.{p}_proj" for p in "qkv"]
        self._attention = SelfAttention(
            builder,
            index,
            builder.linear(projections, (q, kv, kv), hidden, config.attention_bias, rows=(own_q, own_kv, own_kv)),
            builder.summed_linear(f"{name}.self_attn.o_proj", hidden, q, config.output_bias, columns=own_q),
            rotary=rotary,
        )
        self._up = builder.linear(
            f"{name}.mlp.c_fc", (width,), hidden, config.mlp_bias, rows=(columns,), activation=config.activation
        )
        self._down = builder.summed_linear(f"{name}.mlp.c_proj", hidden, width, config.mlp_bias, columns=columns)
        self.norm = builder.layer_norm(f"{name}.input_layernorm")
        self._mlp_norm = builder.layer_norm(f"{name}.post_attention_layernorm")

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        normed = self._attention.add_to(normed, x, step, self._mlp_norm)
        return self._down.add_to(self._up(normed), x, then)
