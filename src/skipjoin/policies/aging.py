"""Aging that follows what ordering by index can gain."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Range that logarithms of the index are clamped to, below the largest one.
INDEX_RANGE = 10.0
# Aging time constant in units of the typical age of waiting requests times the variance of their log index.
_AGES = 8.0
_MIN_TAU_S = 1.0
# Weight of the latest time constant in the mean of logarithms.
_RATE = 0.3


class Aging:
    """Weight of age against the index: key = base(log index) + per_s x arrival.

    Where the indices of waiting requests are alike, ordering by them gains nothing, so age decides: first come, first
    served. Where they differ much, age counts little.

    Args:
        overtaking_s: Seconds of age that outweigh any difference of indices.

    Attributes:
        per_s: Weight of a second, 1 / tau.
    """

    def __init__(self, overtaking_s: float) -> None:
        if not overtaking_s > 0:
            raise ValueError(f"overtaking_s must be above 0, got {overtaking_s}")
        self._max_tau_s = overtaking_s / INDEX_RANGE
        self.per_s = 1.0 / self._max_tau_s
        self._top: float | None = None

    def base(self, log_index: float) -> float:
        """Return the part of the key that follows from the index, in [0, INDEX_RANGE]."""
        if self._top is None:
            self._top = log_index
        return min(INDEX_RANGE, max(0.0, self._top - log_index))

    def derive(self, indices: Sequence[float], waiting: Sequence[int], ages: Sequence[float]) -> None:
        """Derive the time constant from cells with their log index, number of waiting requests and typical age."""
        self._top = max(indices, default=self._top)
        count = sum(waiting)
        if count < 2:
            return
        mean = sum(map(math.prod, zip(waiting, indices, strict=True))) / count
        variance = sum(n * (index - mean) ** 2 for n, index in zip(waiting, indices, strict=True)) / count
        age = sum(map(math.prod, zip(waiting, ages, strict=True))) / count
        tau_s = min(self._max_tau_s, max(_MIN_TAU_S, _AGES * age * variance))
        self.per_s *= math.exp(-_RATE * math.log(tau_s * self.per_s))
