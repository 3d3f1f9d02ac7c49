"""StarCoder2: rotary positions, grouped-query attention, layer norms and an ungated MLP."""

from __future__ import annotations

import torch

from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.layers import Builder, LayerInputs, Rotary, SelfAttention
from skipjoin.model.ops.base import Norm


class Starcoder2Decoder(RotaryDecoder):
    """Embedding, attention and MLP layers, final norm."""

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
