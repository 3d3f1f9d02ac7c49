"""Llama and models of the same architecture: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

import torch

from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.layers import Builder, LayerInputs, Rotary, SelfAttention
from skipjoin.model.ops.base import Norm


class LlamaDecoder(RotaryDecoder):
    """Embedding, attention and gated MLP layers with RMS norms, final norm."""

    EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        super().__init__(
            builder, device, _LlamaLayer, lambda: builder.rms_norm("model.norm", builder.config.hidden_size)
        )


class _LlamaLayer:
    def __init__(self, builder: Builder, index: int, rotary: Rotary) -> None:
        config, shard, name = builder.config, builder.shard, f"model.layers.{index}"
        hidden, dim = config.hidden_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        own_q, own_kv = shard.query_rows(config), shard.kv_rows(config)
        projections = [f"{name}.self_attn.{p}_proj" for p in "qkv"]
        norms = None
        if config.qk_norm:
            of_query, of_key = (builder.rms_norm(f"{name}.self_attn.{p}_norm", dim) for p in "qk")
            norms = of_query, of_key
        self._attention = SelfAttention(
            builder,
            index,
            builder.linear(projections, (q, kv, kv), hidden, config.attention_bias, rows=(own_q, own_kv, own_kv)),
            builder.summed_linear(f"{name}.self_attn.o_proj", hidden, q, config.output_bias, columns=own_q),
            rotary=rotary,
            norms=norms,
        )
        width, own = config.intermediate_size, shard.columns(config)
        gate_up = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        self._gate_up = builder.linear(gate_up, (width, width), hidden, config.mlp_bias, rows=(own, own), gated=True)
        self._down = builder.summed_linear(f"{name}.mlp.down_proj", hidden, width, config.mlp_bias, columns=own)
        self.norm = builder.rms_norm(f"{name}.input_layernorm", hidden)
        self._mlp_norm = builder.rms_norm(f"{name}.post_attention_layernorm", hidden)

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        normed = self._attention.add_to(normed, x, step, self._mlp_norm)
        return self._down.add_to(self._gate_up(normed), x, then)
