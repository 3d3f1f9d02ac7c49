from __future__ import annotations

import torch

from skipjoin.model.config import ModelConfig
from skipjoin.model.page_locked import cpu_bytes
from skipjoin.model.parallel import WHOLE, Shard

# Rows begin with a line of the cache.
_LINE = 64


class StateCache:
    """State of requests in a rank's layers without attention, one contiguous row of bytes for each slot.

    A layer has the last inputs of a convolution in the model's type, and a float32 matrix for each head of a
    recurrence. Rows are not cleared on reuse: the first token of a sequence does not read them.
    """

    def __init__(
        self,
        slots: int,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        pin: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        of = config.states
        assert of is not None
        self.slots = slots
        layers, row_bytes = len(shard.state_layers(config)), self.bytes_per_slot(config, dtype, shard)
        if torch.device(device).type == "cpu":
            self.tensor = cpu_bytes(self, slots * row_bytes, pin=pin).view(slots, row_bytes)
        else:
            self.tensor = torch.zeros((slots, row_bytes), dtype=torch.uint8, device=device)
        inputs, matrices = of.layer_bytes(dtype.itemsize)
        end = layers * inputs
        self._inputs = self.tensor[:, :end].view(dtype).view(slots, layers, of.kernel - 1, of.channels)
        begin = _aligned(end)
        self._matrices = (
            self.tensor[:, begin : begin + layers * matrices]
            .view(torch.float32)
            .view(slots, layers, of.heads, of.key_dim, of.value_dim)
            if matrices
            else None
        )

    def inputs(self, layer: int) -> torch.Tensor:
        """Return [slots, kernel - 1, channels], oldest first."""
        return self._inputs[:, layer]

    def matrices(self, layer: int) -> torch.Tensor:
        """Return [slots, heads, key_dim, value_dim]."""
        assert self._matrices is not None
        return self._matrices[:, layer]

    @staticmethod
    def bytes_per_slot(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> int:
        if (of := config.states) is None:
            return 0
        layers, (inputs, matrices) = len(shard.state_layers(config)), of.layer_bytes(dtype.itemsize)
        return _aligned(layers * inputs) + _aligned(layers * matrices)


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE
