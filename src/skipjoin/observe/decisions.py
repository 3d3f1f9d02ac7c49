"""How long decisions take: wall-clock times, kept in buckets that cost the same however many there are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

# Buckets per doubling: each is 2.2 % wide.
_PER_OCTAVE = 32
# A clock that did not advance counts as this.
_LEAST_S = 1e-9


class DecisionTimes:
    """Wall-clock times of one scheduler's decisions."""

    __slots__ = ("_buckets", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0  # in all
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """A decision took that long."""
        self.seconds += seconds
        self._buckets[math.floor(math.log2(max(seconds, _LEAST_S)) * _PER_OCTAVE)] += 1

    @staticmethod
    def summary(schedulers: Iterable[DecisionTimes]) -> dict[str, Any]:
        """The record's `decision_ms`: the mean, and the 99th percentile to 2.2 %; None where nothing was decided."""
        schedulers = list(schedulers)
        buckets = sum((one._buckets for one in schedulers), Counter[int]())
        if not buckets:
            return {"mean": None, "p99": None}
        mean_s = sum(one.seconds for one in schedulers) / buckets.total()
        above = buckets.total() // 100
        for bucket in sorted(buckets, reverse=True):
            above -= buckets[bucket]
            if above < 0:
                break
        return {"mean": 1000 * mean_s, "p99": 1000 * 2 ** ((bucket + 0.5) / _PER_OCTAVE)}
