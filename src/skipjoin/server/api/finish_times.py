"""Predictions of when the queue moves on: by recent throughput, and by the lengths of recent sequences."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from heapq import nsmallest
from itertools import islice

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
    """Predicts when running sequences finish, from recent lengths in engine steps, whose duration varies."""

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
