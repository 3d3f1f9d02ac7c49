"""GPT-NeoX (Pythia): partial rotation, attention and MLP in parallel or in sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import activation, rope
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Layer
from skipjoin.model.ops.base import Linear, Norm
from skipjoin.model.parallel import scaled
from skipjoin.model.self_attention import Rotary, SelfAttention


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    max_positions = int(raw["max_position_embeddings"])
    bias = bool(raw.get("attention_bias", True))
    return {
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": max_positions,
        "norm_eps": float(raw.get("layer_norm_eps", 1e-5)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": activation(raw.get("hidden_act", "gelu")),
        "rope": rope(raw, hidden // heads, max_positions, 0.25),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "parallel_residual": bool(raw.get("use_parallel_residual", True)),
    }


@family("gpt_neox", architectures={"GPTNeoXForCausalLM": "gpt_neox"}, fields=_fields, prefix="gpt_neox.")
class GPTNeoXDecoder(RotaryDecoder):
    EMBEDDING, OUTPUT = "gpt_neox.embed_in.weight", "embed_out.weight"

    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer:
        return _NeoXLayer(builder, index, rotary)

    @staticmethod
    def final_norm(builder: Builder) -> Norm:
        return builder.layer_norm("gpt_neox.final_layer_norm")


class _NeoXLayer:
    def __init__(self, builder: Builder, index: int, rotary: Rotary | None) -> None:
        config, shard, name = builder.config, builder.shard, f"gpt_neox.layers.{index}"
        hidden, heads = config.hidden_size, shard.query_rows(config)
        self._parallel = config.parallel_residual
        # In parallel, attention and MLP share one all-reduce.
        apart = not self._parallel
        output, up, down = f"{name}.attention.dense", f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
        self._attention = SelfAttention(
            builder,
            index,
            _query_key_value(builder, f"{name}.attention.query_key_value"),
            builder.summed_linear(output, hidden, hidden, config.output_bias, columns=heads, ends=apart),
            rotary=rotary,
        )
        self._up, self._down = builder.mlp(up, down, config.activation, begins=apart)
        self.norm = builder.layer_norm(f"{name}.input_layernorm")
        self._mlp_norm = builder.layer_norm(f"{name}.post_attention_layernorm")

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        if self._parallel:
            overlapped = self._mlp_norm(x)
            self._attention.add_to(normed, x, step)
        else:
            overlapped = self._attention.add_to(normed, x, step, self._mlp_norm)
        return self._down.add_to(self._up(overlapped), x, then)


def _query_key_value(builder: Builder, name: str) -> Linear:
    config, heads = builder.config, builder.shard.heads(builder.config)
    hidden, dim, count = config.hidden_size, config.head_dim, len(heads)
    order = torch.arange(3 * count * dim).view(count, 3, dim).transpose(0, 1).flatten()
    own = scaled(heads, 3 * dim)
    return builder.linear(name, (3 * hidden,), hidden, config.attention_bias, rows=[own], orders=[order])
