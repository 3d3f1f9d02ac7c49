from __future__ import annotations

from typing import Protocol

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.layers import Builder, Embedding, LayerInputs


class Decoder(Protocol):
    """A model family's layers between token ids and the output projection."""

    EMBEDDING: str
    OUTPUT: str
    embedding: Embedding | None

    def __init__(self, builder: Builder, device: torch.device | str) -> None: ...

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        """Return the embeddings [T, hidden]. Only called on the first stage."""
        ...

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        """Run [T, hidden] through this rank's layers; may change `x`."""
        ...

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to the input of the output projection. Only called on the last stage."""
        ...
