"""What slices add to a step, and how much fits into a time."""

from __future__ import annotations

from typing import NamedTuple

from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape

# A prompt is not cut to fewer tokens than this to fit a time: each chunk costs a slice.
LEAST_CHUNK = 16


class StepLoad(NamedTuple):
    """A shape's figures, and the KV blocks that have to come back before the step."""

    prefill: int = 0
    attention: int = 0
    decodes: int = 0
    context: int = 0
    away: int = 0

    @classmethod
    def of(cls, start: int, tokens: int, away: int = 0) -> StepLoad:
        """Of a slice of so many tokens from position `start` on."""
        if tokens == 1:
            return cls(0, 0, 1, start + 1, away)
        return cls(tokens, tokens * start + tokens * (tokens + 1) // 2, 0, 0, away)

    def plus(self, other: StepLoad, sign: int = 1) -> StepLoad:
        """Both together, or without the other one."""
        prefill, attention, decodes, context, away = other
        return StepLoad(
            self.prefill + sign * prefill,
            self.attention + sign * attention,
            self.decodes + sign * decodes,
            self.context + sign * context,
            self.away + sign * away,
        )

    def seconds(self, cost: CostModel) -> float:
        """Of the step."""
        prefill, attention, decodes, context, away = self
        step = cost.step(StepShape(prefill, attention, decodes, context))
        return step + cost.transfer(away) if away else step


def fitting_tokens(load: StepLoad, start: int, most: int, *, away: int, cost: CostModel, limit: float) -> int:
    """How many tokens of a request, at most `most` from `start` on, a step with this load can compute within `limit`
    seconds; 0: too few to be worth a slice."""
    if load.plus(StepLoad.of(start, most, away)).seconds(cost) <= limit:
        return most
    low = 0
    while most - low > LEAST_CHUNK:
        middle = (low + most) // 2
        if load.plus(StepLoad.of(start, middle, away)).seconds(cost) <= limit:
            low = middle
        else:
            most = middle
    return low if low >= LEAST_CHUNK else 0
