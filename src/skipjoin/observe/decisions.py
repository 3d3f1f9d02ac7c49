from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

# Buckets per doubling: each is 2.2 % wide.
_PER_OCTAVE = 32
# Minimum duration, because the clock may not advance during a decision.
_MIN_S = 1e-9


class DecisionTimes:
    __slots__ = ("_buckets", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0  # total
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self._buckets[math.floor(math.log2(max(seconds, _MIN_S)) * _PER_OCTAVE)] += 1

    @staticmethod
    def summary(schedulers: Iterable[DecisionTimes]) -> dict[str, Any]:
        """Return mean and 99th percentile in ms, accurate to 2.2 %; None without decisions."""
        schedulers = list(schedulers)
        buckets = sum((scheduler._buckets for scheduler in schedulers), Counter[int]())
        if not buckets:
            return {"mean": None, "p99": None}
        mean_s = sum(scheduler.seconds for scheduler in schedulers) / buckets.total()
        above = buckets.total() // 100
        for bucket in sorted(buckets, reverse=True):
            above -= buckets[bucket]
            if above < 0:
                break
        return {"mean": 1000 * mean_s, "p99": 1000 * 2 ** ((bucket + 0.5) / _PER_OCTAVE)}
