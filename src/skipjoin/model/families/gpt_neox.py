"""GPT-NeoX (Pythia): partial rotation, attention and MLP side by side or one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from skipjoin.model.layers import Builder, Rotary, SelfAttention, Step, activation
from skipjoin.model.ops.base import Linear


class GPTNeoXDecoder:
    """Embedding, layers of attention and MLP, final norm."""

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        config = builder.config
        self.embedding = builder.tensor("gpt_neox.embed_in.weight", config.vocab_size, config.hidden_size)
        rotary = Rotary(config, device)
        self._layers = [_Layer(builder, i, rotary) for i in range(config.num_layers)]
        self._norm = builder.layer_norm("gpt_neox.final_layer_norm")

    def hidden(self, step: Step) -> torch.Tensor:
        """The batch's tokens through all layers: [T, hidden], before the final norm."""
        x = F.embedding(step.batch.token_ids, self.embedding)
        for layer in self._layers:
            layer(x, step)
        return x

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> what the output projection multiplies."""
        return self._norm(hidden)


class _Layer:
    def __init__(self, builder: Builder, index: int, rotary: Rotary) -> None:
        config, name = builder.config, f"gpt_neox.layers.{index}"
        hidden, width = config.hidden_size, config.intermediate_size
        self._attention = SelfAttention(
            builder,
            index,
            _query_key_value(builder, f"{name}.attention.query_key_value"),
            builder.linear(f"{name}.attention.dense", (hidden,), hidden, config.output_bias),
            rotary=rotary,
        )
        self._up = builder.linear(f"{name}.mlp.dense_h_to_4h", (width,), hidden, True)
        self._down = builder.linear(f"{name}.mlp.dense_4h_to_h", (hidden,), width, True)
        self._attention_norm = builder.layer_norm(f"{name}.input_layernorm")
        self._mlp_norm = builder.layer_norm(f"{name}.post_attention_layernorm")
        self._parallel, self._activation = config.parallel_residual, config.activation

    def __call__(self, x: torch.Tensor, step: Step) -> None:
        """Adds this layer's part to `x` in place."""
        normed = self._attention_norm(x)
        beside = self._mlp_norm(x) if self._parallel else None
        self._attention.add_to(normed, x, step)
        inner = self._up(self._mlp_norm(x) if beside is None else beside)
        self._down.add_to(activation(self._activation, inner), x)


def _query_key_value(builder: Builder, name: str) -> Linear:
    """The checkpoint keeps each head's query, key and value rows together; attention wants all queries first."""
    config = builder.config
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    weight = builder.weights.take(f"{name}.weight", 3 * hidden, hidden)
    weight = weight.view(heads, 3, dim, hidden).transpose(0, 1).reshape(3 * hidden, hidden)
    bias = None
    if config.attention_bias:
        bias = builder.weights.take(f"{name}.bias", 3 * hidden).view(heads, 3, dim).transpose(0, 1).flatten()
    return builder.finish_linear(weight, bias)
