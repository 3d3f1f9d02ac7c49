from __future__ import annotations

from typing import NamedTuple

from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape

# Minimum chunk when a prompt is cut to a time limit, as each chunk costs a slice.
MIN_CHUNK = 16


class StepLoad(NamedTuple):
    """Shape of a step, and the KV blocks to swap in before it."""

    prefill: int = 0
    attention: int = 0
    decodes: int = 0
    context: int = 0
    swapped_out: int = 0

    @classmethod
    def of(cls, start: int, tokens: int, swapped_out: int = 0) -> StepLoad:
        if tokens == 1:
            return cls(0, 0, 1, start + 1, swapped_out)
        return cls(tokens, tokens * start + tokens * (tokens + 1) // 2, 0, 0, swapped_out)

    def plus(self, other: StepLoad, sign: int = 1) -> StepLoad:
        prefill, attention, decodes, context, swapped_out = other
        return StepLoad(
            self.prefill + sign * prefill,
            self.attention + sign * attention,
            self.decodes + sign * decodes,
            self.context + sign * context,
            self.swapped_out + sign * swapped_out,
        )

    def seconds(self, cost: CostModel) -> float:
        prefill, attention, decodes, context, swapped_out = self
        step = cost.step(StepShape(prefill, attention, decodes, context))
        return step + cost.transfer(swapped_out) if swapped_out else step


def fitting_tokens(load: StepLoad, start: int, most: int, *, swapped_out: int, cost: CostModel, limit: float) -> int:
    """Return how many tokens, at most `most`, fit this step within `limit` seconds; 0 if too few for a slice."""
    if load.plus(StepLoad.of(start, most, swapped_out)).seconds(cost) <= limit:
        return most
    low = 0
    while most - low > MIN_CHUNK:
        middle = (low + most) // 2
        if load.plus(StepLoad.of(start, middle, swapped_out)).seconds(cost) <= limit:
            low = middle
        else:
            most = middle
    return low if low >= MIN_CHUNK else 0
