from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.layers import Builder, Embedding, LayerInputs
from skipjoin.model.ops.base import Linear


class Decoder(Protocol):
    """A model family's layers between token ids and the output projection."""

    EMBEDDING: str
    OUTPUT: str
    embedding: Embedding | None

    def __init__(self, builder: Builder, device: torch.device | str) -> None: ...

    def embed(self, batch: PackedBatch) -> torch.Tensor: ...

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor: ...

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to the input of the output projection."""
        ...


@runtime_checkable
class HasOutput(Protocol):
    """A decoder with an output projection of its own, in place of the tensor `OUTPUT`."""

    output: Linear
