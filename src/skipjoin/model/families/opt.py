"""OPT: learned positions, with layer norms before or after each sublayer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.batch import PackedBatch
from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import activation
from skipjoin.model.family import family
from skipjoin.model.layers import SequentialLayer, advance
from skipjoin.model.modules import Embedding
from skipjoin.model.ops.base import Linear, Norm
from skipjoin.model.self_attention import separate_attention

# The first two rows of OPT's position table are padding.
POSITION_OFFSET = 2


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    before = bool(raw.get("do_layer_norm_before", True))
    bias = bool(raw.get("enable_bias", True))
    return {
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": int(raw["ffn_dim"]),
        "max_positions": int(raw["max_position_embeddings"]),
        "norm_eps": 1e-5,
        "tie_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "activation": activation(raw.get("activation_function", "relu")),
        "rope": None,
        "embed_dim": int(raw.get("word_embed_proj_dim") or hidden),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "norm_before": before,
        "final_norm": before and not raw.get("_remove_final_layer_norm", False),
        "norm_affine": bool(raw.get("layer_norm_elementwise_affine", True)),
    }


@family("opt", architectures={"OPTForCausalLM": "opt"}, fields=_fields, prefix="model.")
class OPTDecoder:
    EMBEDDING, OUTPUT = "model.decoder.embed_tokens.weight", "lm_head.weight"

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        config, shard, name = builder.config, builder.shard, "model.decoder"
        hidden, embed = config.hidden_size, config.embed_dim
        self.embedding: Embedding | None = None
        self._positions: torch.Tensor | None = None
        self._project_in: Linear | None = None
        self._project_out: Linear | None = None
        self._norm: Norm | None = None
        if shard.is_first:
            self.embedding = builder.embedding(self.EMBEDDING)
            positions = config.max_positions + POSITION_OFFSET
            self._positions = builder.tensor(f"{name}.embed_positions.weight", positions, hidden)
            if embed != hidden:
                self._project_in = builder.linear(f"{name}.project_in", (hidden,), embed, False, takes_adapters=False)
        self._layers = [_OptLayer(builder, i) for i in shard.layers(config)]
        self._norm_before = config.norm_before
        if shard.is_last:
            if embed != hidden:
                self._project_out = builder.linear(f"{name}.project_out", (embed,), hidden, False, takes_adapters=False)
            self._norm = builder.layer_norm(f"{name}.final_layer_norm") if config.final_norm else None

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        assert self.embedding is not None  # on the first stage
        assert self._positions is not None
        x = self.embedding(batch.token_ids)
        if self._project_in is not None:
            x = self._project_in(x)
        return x + F.embedding(batch.positions + POSITION_OFFSET, self._positions)

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        if self._norm_before:
            return advance(self._layers, x, step)
        for layer in self._layers:
            x = layer.norm_after(x, step)
        return x

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._norm is not None:
            hidden = self._norm(hidden)
        return hidden if self._project_out is None else self._project_out(hidden)


class _OptLayer(SequentialLayer):
    def __init__(self, builder: Builder, index: int) -> None:
        name = f"model.decoder.layers.{index}"
        attention = separate_attention(builder, index, f"{name}.self_attn", "out_proj")
        up, down = builder.mlp(f"{name}.fc1", f"{name}.fc2", builder.config.activation)
        norm = builder.layer_norm(f"{name}.self_attn_layer_norm")
        super().__init__(norm, attention, builder.layer_norm(f"{name}.final_layer_norm"), up, down)

    def norm_after(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        x = self._attention.add_to(x, x, step, self.norm)
        return self._down.add_to(self._up(x), x, self._mlp_norm)
