"""OPT: learned positions, layer norms before or after each part."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from skipjoin.model.layers import Builder, SelfAttention, Step, activation

# The first two rows of OPT's position table belong to padding.
POSITION_OFFSET = 2


class OPTDecoder:
    """Token and position embeddings, layers of attention and MLP, final norm."""

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        config, name = builder.config, "model.decoder"
        hidden, embed = config.hidden_size, config.embed_dim
        self.embedding = builder.tensor(f"{name}.embed_tokens.weight", config.vocab_size, embed)
        positions = config.max_positions + POSITION_OFFSET
        self._positions = builder.tensor(f"{name}.embed_positions.weight", positions, hidden)
        self._project_in = self._project_out = None
        if embed != hidden:
            self._project_in = builder.linear(f"{name}.project_in", (hidden,), embed, False)
            self._project_out = builder.linear(f"{name}.project_out", (embed,), hidden, False)
        self._layers = [_Layer(builder, i) for i in range(config.num_layers)]
        self._norm = builder.layer_norm(f"{name}.final_layer_norm") if config.final_norm else None

    def hidden(self, step: Step) -> torch.Tensor:
        """The batch's tokens through all layers: [T, hidden], before the final norm."""
        x = F.embedding(step.batch.token_ids, self.embedding)
        if self._project_in is not None:
            x = self._project_in(x)
        x = x + F.embedding(step.batch.positions + POSITION_OFFSET, self._positions)
        for layer in self._layers:
            x = layer(x, step)
        return x

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> what the output projection multiplies, [rows, embed]."""
        if self._norm is not None:
            hidden = self._norm(hidden)
        return hidden if self._project_out is None else self._project_out(hidden)


class _Layer:
    def __init__(self, builder: Builder, index: int) -> None:
        config, name = builder.config, f"model.decoder.layers.{index}"
        hidden, width = config.hidden_size, config.intermediate_size
        projections = [f"{name}.self_attn.{p}_proj" for p in "qkv"]
        self._attention = SelfAttention(
            builder,
            index,
            builder.linear(projections, (hidden,) * 3, hidden, config.attention_bias),
            builder.linear(f"{name}.self_attn.out_proj", (hidden,), hidden, config.output_bias),
        )
        self._up = builder.linear(f"{name}.fc1", (width,), hidden, config.mlp_bias)
        self._down = builder.linear(f"{name}.fc2", (hidden,), width, config.mlp_bias)
        self._attention_norm = builder.layer_norm(f"{name}.self_attn_layer_norm")
        self._mlp_norm = builder.layer_norm(f"{name}.final_layer_norm")
        self._before, self._activation = config.norm_before, config.activation

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; may change `x`."""
        if self._before:
            self._attention.add_to(self._attention_norm(x), x, step)
            self._down.add_to(self._inner(self._mlp_norm(x)), x)
            return x
        self._attention.add_to(x, x, step)
        x = self._attention_norm(x)
        self._down.add_to(self._inner(x), x)
        return self._mlp_norm(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return activation(self._activation, self._up(x))
