from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

# Range that logarithms of the index are clamped to, below the largest one.
INDEX_RANGE = 10.0
# Difference of keys, in logarithms of the index, below which no request preempts another and no KV moves.
MARGIN = 0.2
# Aging time constant in units of the typical age of waiting requests times the variance of their log index.
_AGES = 8.0
# Its first value and its minimum, in decode steps.
_FIRST_TAU_STEPS, _MIN_TAU_STEPS = 16_384, 50
# Weight of the latest time constant in the mean of logarithms.
_RATE = 0.3


class Aging:
    """Weight of age against the index: key = base(log index) + per_s x arrival, of which `per_s` is 1 / tau.

    Where the indices of waiting and new requests are alike, ordering by them gains nothing, so age decides. New
    requests count as much as waiting ones, because a queue may hold only long requests that short new ones should
    overtake.
    """

    def __init__(self, step_s: float) -> None:
        self.per_s = 1.0 / (_FIRST_TAU_STEPS * step_s)
        self.step_s = step_s  # seconds of a decode step, which may be updated
        self._top: float | None = None

    def base(self, log_index: float) -> float:
        """Return the part of the key that follows from the index, in [0, INDEX_RANGE]."""
        if self._top is None:
            self._top = log_index
        return min(INDEX_RANGE, max(0.0, self._top - log_index))

    def derive(
        self,
        indices: Sequence[float],
        waiting: Sequence[int],
        ages: Sequence[float],
        new: Iterable[tuple[float, float]] = (),
    ) -> None:
        """Derive tau from log index, waiting requests and age in seconds of each cell, and from `new` requests."""
        self._top = max(indices, default=self._top)
        count = sum(waiting)
        if count < 2:
            return
        both = [*_shares(zip(indices, waiting, strict=True)), *_shares(new)]
        weight = math.fsum(share for _, share in both)
        mean = math.fsum(share * index for index, share in both) / weight
        variance = math.fsum(share * (index - mean) ** 2 for index, share in both) / weight
        age = sum(map(math.prod, zip(waiting, ages, strict=True))) / count
        tau_s = max(_MIN_TAU_STEPS * self.step_s, _AGES * age * variance)
        self.per_s *= math.exp(-_RATE * math.log(tau_s * self.per_s))


def _shares(weights: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    weights = list(weights)
    total = math.fsum(weight for _, weight in weights)
    return [(index, weight / total) for index, weight in weights]
