from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from heapq import nsmallest
from itertools import islice
from statistics import fmean

# Factor on predicted finish times: steps take longer as the load rises.
RETRY_AFTER_MARGIN = 1.3
# Quantile of recent lengths at which a running sequence is expected to finish. The first of many finishes early.
_FINISH_QUANTILE = 0.25
# Maximum number of running sequences that a prediction looks at, so that a refusal stays cheap.
_MAX_SAMPLES = 64
# Number of recent events to estimate from, at least.
_MIN_EVENTS = 32
# Window of the throughput estimate.
_WINDOW_S = 10.0
# Minimum window of the step duration. A mean over whole sequences would follow a changed load too late.
_PACE_S = 0.5


class Throughput:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()  # start of the window
        self._events: deque[tuple[float, float]] = deque()  # (time, amount)
        self._sum = 0.0
        self._latest = self._since
        self._gap_s = 0.0  # longest gap between two events, decaying with time

    def add(self, amount: float) -> None:
        now = self._clock()
        gap_s, self._latest = now - self._latest, now
        self._gap_s = max(gap_s, self._gap_s * math.exp(-gap_s / _WINDOW_S))
        self._events.append((now, amount))
        self._sum += amount
        while len(self._events) > _MIN_EVENTS and self._events[0][0] < now - _WINDOW_S:
            self._since, dropped = self._events.popleft()
            self._sum -= dropped

    def seconds_until(self, amount: float) -> float:
        return max(self.by_rate(amount), self._gap_s, self._clock() - self._latest)

    def by_rate(self, amount: float) -> float:
        return (self._clock() - self._since) * amount / self._sum if self._sum else 0.0


class Pace:
    def __init__(self, clock: Callable[[], float], steps: Callable[[], float]) -> None:
        self._clock, self._steps = clock, steps
        self._latest_s = 0.0
        self.start()

    def start(self) -> None:
        self._before = self._mark = (self._clock(), self._steps())

    def seconds(self) -> float:
        now = (self._clock(), self._steps())
        if now[0] - self._mark[0] >= _PACE_S:
            self._before, self._mark = self._mark, now
        passed_s, steps = now[0] - self._before[0], now[1] - self._before[1]
        if not steps > 0:
            return max(self._latest_s, passed_s)
        self._latest_s = passed_s / steps
        return self._latest_s


class Runs:
    """Predicts when running sequences finish, from recent lengths in engine steps."""

    def __init__(self, clock: Callable[[], float], steps: Callable[[], float]) -> None:
        self._steps = steps
        self._pace = Pace(clock, steps)
        self._live: dict[Hashable, float] = {}  # first step of each running sequence, in this order
        self._lengths: deque[float] = deque(maxlen=_MIN_EVENTS)

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, sequence: Hashable) -> None:
        if not self._live:
            self._pace.start()
        self._live.setdefault(sequence, self._steps())

    def end(self, sequence: Hashable) -> None:
        if (start := self._live.pop(sequence, None)) is not None:
            self._lengths.append(self._steps() - start)
            self._pace.seconds()  # update the pace before the engines may become idle

    def seconds_until(self, count: int) -> float | None:
        every = -(-len(self._live) // _MAX_SAMPLES)  # sample every n-th sequence
        starts = list(islice(self._live.values(), 0, None, every or 1))
        if not (self._lengths and starts):
            return None
        step, lengths = self._steps(), sorted(self._lengths)
        remaining = (_remaining(lengths, step - start) for start in starts)
        return RETRY_AFTER_MARGIN * self._pace.seconds() * nsmallest(-(-count // every), remaining)[-1]


def _remaining(lengths: Sequence[float], age: float) -> float:
    shorter = bisect_right(lengths, age)
    if shorter == len(lengths):
        return age - lengths[-1]
    return lengths[shorter + int(_FINISH_QUANTILE * (len(lengths) - shorter))] - age


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

    The estimate is a quantile of recent waits relative to position times pace. It rises when a wait exceeds it, and
    falls otherwise, so that the share holds under any load.
    """

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=_STARTS)
        self._latest = 0.0  # time of the latest start
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []
        self._level = COVERED

    def at_pace(self, position: int) -> float | None:
        """Return the seconds until a position (from 1) starts, None if unknown."""
        return position * max(_MIN_S, fmean(self._gaps)) if self._gaps else None

    def estimate(self, at_pace_s: float | None) -> float | None:
        if at_pace_s is None or not self._sorted:
            return None
        return at_pace_s * self._sorted[min(len(self._sorted) - 1, int(self._level * len(self._sorted)))]

    def note(self, since: float, now: float, at_pace_s: float | None, estimate_s: float | None) -> None:
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
