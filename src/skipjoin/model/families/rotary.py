"""What the families with rotary positions have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.layers import Builder, Layer, LayerInputs, Rotary, advance
from skipjoin.model.ops.base import Norm


class RotaryDecoder:
    """Embedding, layers that rotate queries and keys, final norm; of a stage, its part of that.

    make_layer: makes the layer of an index. final_norm: makes the norm behind the last layer.
    """

    EMBEDDING: ClassVar[str]
    OUTPUT: ClassVar[str]

    def __init__(
        self,
        builder: Builder,
        device: torch.device | str,
        make_layer: Callable[[Builder, int, Rotary], Layer],
        final_norm: Callable[[], Norm],
    ) -> None:
        config, shard = builder.config, builder.shard
        self.embedding = builder.embedding(self.EMBEDDING) if shard.is_first else None
        rotary = Rotary(config, device)
        self._layers = [make_layer(builder, index, rotary) for index in shard.layers(config)]
        self._norm = final_norm() if shard.is_last else None

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        """The embeddings of the batch's tokens, [T, hidden], on the first stage."""
        return self.embedding(batch.token_ids)

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        """Pass [T, hidden] through this rank's layers; may change `x`."""
        return advance(self._layers, x, step)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> the input of the output projection, on the last stage."""
        return self._norm(hidden)
