from __future__ import annotations

from bisect import insort
from collections import deque
from statistics import fmean

# Share of actual waits that an estimate is meant to cover.
COVERED = 0.8
# Recent starts from which the pace of the queue is measured, and recent waits relative to it.
_STARTS, _WAITS = 32, 64
# By how much each wait moves the quantile in use, so that the covered share is right in the long run.
_RATE = 0.02
_MIN_LEVEL, _MAX_LEVEL = 0.5, 0.99
# Less than any wait takes, so that ratios stay finite.
_MIN_S = 1e-6


class QueueWaits:
    """Estimates waits from the position in the queue and its pace, so that 80 % of actual waits are covered.

    The estimate is a quantile of recent waits relative to position times pace. It rises when a wait exceeds its
    estimate, and falls when it does not. So the share holds in the long run, however the load changes.
    """

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_STARTS)
        self._latest = 0.0  # time of the latest start
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []
        self._level = COVERED

    def at_pace(self, position: int) -> float | None:
        """Return the seconds until a position, from 1 on, has started at the recent pace; None if it is unknown."""
        return position * max(_MIN_S, fmean(self._gaps)) if self._gaps else None

    def estimate(self, at_pace_s: float | None) -> float | None:
        if at_pace_s is None or not self._sorted:
            return None
        return at_pace_s * self._sorted[min(len(self._sorted) - 1, int(self._level * len(self._sorted)))]

    def note(self, since: float, now: float, at_pace_s: float | None, estimate_s: float | None) -> None:
        """Learn from a request that waited from `since` until `now`, given what was known when it came."""
        # Time in which nothing waited is no part of the pace.
        self._gaps.append(now - max(self._latest, since))
        self._latest = now
        if at_pace_s is None:
            return
        if estimate_s is not None:
            level = self._level + _RATE * ((now - since > estimate_s) - (1 - COVERED))
            self._level = min(_MAX_LEVEL, max(_MIN_LEVEL, level))
        if len(self._ratios) == _WAITS:
            self._sorted.remove(self._ratios.popleft())
        ratio = (now - since) / at_pace_s
        self._ratios.append(ratio)
        insort(self._sorted, ratio)
