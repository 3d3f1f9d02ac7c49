from __future__ import annotations

import math

from skipjoin.core.step import StepShape
from skipjoin.policies.cost import LinearCost, scaled

# Time after which a step counts for 1/e of a new one.
_MEMORY_S = 1800.0


class StepTimes:
    """Means of steps over half an hour, which describe a load; the learned cost model follows the last steps."""

    def __init__(self) -> None:
        self._steps = self._seconds = self._gaps = self._gap_s = 0.0
        self._shape = [0.0] * len(StepShape._fields)
        self._last: float | None = None
        self._ended: float | None = None

    def step_ended(self, now: float, seconds: float, compute_s: float, shape: StepShape) -> None:
        kept = 1.0 if self._last is None else math.exp(-(now - self._last) / _MEMORY_S)
        self._steps = kept * self._steps + 1
        self._seconds = kept * self._seconds + compute_s
        self._shape = [kept * total + count for total, count in zip(self._shape, shape, strict=True)]
        if self._ended is not None:
            self._gaps = kept * self._gaps + 1
            self._gap_s = kept * self._gap_s + max(0.0, now - self._ended - seconds)
        self._last = self._ended = now

    def paused(self) -> None:
        self._ended = None

    @property
    def between_s(self) -> float:
        return self._gap_s / self._gaps if self._gaps else 0.0

    def matched(self, cost: LinearCost) -> LinearCost:
        """Return the cost model, scaled so that its estimate for the mean step equals the mean measured duration."""
        if not self._steps:
            return cost
        prefill, attention, decodes, context = (total / self._steps for total in self._shape)
        # A model takes counts as integers, but is linear in them.
        estimate = cost.step(StepShape(prefill, attention, decodes, context))  # type: ignore[arg-type]
        return scaled(cost, self._seconds / self._steps / estimate)
