"""Cost models: seconds for the shape of a step, seconds for a transfer."""

from __future__ import annotations

from dataclasses import dataclass

from skipjoin.core.step import StepShape


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Step time linear in its shape, above a floor (BROS section 4.2, ALISE section 3.2).

    floor: seconds of the smallest step. prefill_token: seconds per token of a slice longer than one.
    attention_pair: per query-key pair of those. decode: per decoding request. context_token: per KV token that
    decodes read. block: per KV block moved; transfer_floor: per transfer.
    """

    floor: float
    prefill_token: float
    attention_pair: float = 0.0
    decode: float = 0.0
    context_token: float = 0.0
    block: float = 0.0
    transfer_floor: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0 seconds, got {value}")
        if self.floor <= 0:
            raise ValueError(f"floor must be above 0 seconds, got {self.floor}")

    def step(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        return (
            self.floor
            + self.prefill_token * shape.prefill
            + self.attention_pair * shape.attention
            + self.decode * shape.decodes
            + self.context_token * shape.context
        )

    def transfer(self, blocks: int) -> float:
        """Seconds to move `blocks` KV blocks one way."""
        return self.transfer_floor + self.block * blocks
