from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.batch import PackedBatch
from skipjoin.model.builder import Builder
from skipjoin.model.families.encoder import WholeAttention
from skipjoin.model.layers import Layer, advance, fused
from skipjoin.model.ops.base import Norm
from skipjoin.model.self_attention import Rotary, rotaries


class RotaryDecoder(ABC):
    """Decoder with rotary positions. Tensors have Llama's names unless a family overrides them."""

    EMBEDDING = "model.embed_tokens.weight"
    OUTPUT = "lm_head.weight"

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        config, shard = builder.config, builder.shard
        self.embedding = builder.embedding(self.EMBEDDING) if shard.is_first else None
        self._layers = [self.layer(builder, index, rotary) for index, rotary in rotaries(builder, device).items()]
        self._norm = self.final_norm(builder) if shard.is_last else None
        self._whole = WholeAttention(builder.ops) if config.is_encoder else None
        self._fused = None if self._whole is not None else fused(builder, self._layers, self._norm)
        self._adapters = builder.adapters

    @staticmethod
    @abstractmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer: ...

    @staticmethod
    def final_norm(builder: Builder) -> Norm:
        return builder.rms_norm("model.norm")

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        assert self.embedding is not None  # on the first stage
        return self.embedding(batch.token_ids)

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        if self._whole is not None:
            step = replace(step, attention=self._whole)
        if self._fused is None:
            return advance(self._layers, x, step)
        if self._adapters.has_slices:
            return self._fused(x, step.batch, step.kv)
        advanced = advance(self._layers, x, step)
        return advanced if self._norm is None else self._norm(advanced)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._norm is not None  # on the last stage
        return self._norm(hidden) if self._fused is None else hidden
