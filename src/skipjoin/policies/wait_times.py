from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Fact
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.valued import Valued

# Weight of the latest step in the mean batch size.
_BATCH_RATE = 0.05
# Initial bucket width, in logarithms of remaining times: 1 %.
_BUCKET = 0.01
# Maximum number of buckets.
_BUCKETS = 256
# Hysteresis in decode steps.
_HYSTERESIS_STEPS = 12


class Backlog:
    """Histogram of work in seconds by key, whose bucket width doubles above `_BUCKETS` buckets."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._halvings = 0
        self._sums: dict[int, list[float]] = {}  # [requests, seconds] by bucket

    def add(self, key: float, seconds: float) -> None:
        bucket = self._sums.setdefault(self._bucket(key), [0, 0.0])
        bucket[0] += 1
        bucket[1] += seconds
        while len(self._sums) > _BUCKETS:
            self._widen()

    def remove(self, key: float, seconds: float) -> None:
        place = self._bucket(key)
        bucket = self._sums[place]
        bucket[0] -= 1
        bucket[1] -= seconds
        if not bucket[0]:
            del self._sums[place]

    def before(self, keys: Iterable[float]) -> Iterator[float]:
        sums, at, total = sorted(self._sums.items()), 0, 0.0
        for key in keys:
            place = self._bucket(key)
            while at < len(sums) and sums[at][0] < place:
                total += sums[at][1][1]
                at += 1
            yield total

    def _bucket(self, key: float) -> int:
        return math.floor(key / self._width) >> self._halvings

    def _widen(self) -> None:
        sums, self._sums = self._sums, {}
        self._halvings += 1
        for place, (requests, seconds) in sums.items():
            bucket = self._sums.setdefault(place >> 1, [0, 0.0])
            bucket[0] += requests
            bucket[1] += seconds


class ShortestWithWaits(Valued):
    """Shortest remaining time first, with next scheduled times from wait times (ALISE section 3.2, equations 6 and 7).

    The wait time is the total remaining time of smaller keys divided by the mean batch size, up to the time when aging
    ranks the request before all future arrivals. Requests that run count only if they are passed to `expected_order`.
    """

    def __init__(self, value: RemainingTime) -> None:
        super().__init__(value)
        self._remaining = value
        self._batch = 1.0  # mean number of requests in a step
        self._backlog = Backlog(_BUCKET)
        self._waiting: dict[Request, tuple[float, float]] = {}  # arguments of `Backlog.add`

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        if slices:
            self._batch += _BATCH_RATE * (len(slices) - self._batch)
        waiting = self._waiting
        for slice_ in slices:
            if slice_.request in waiting:
                self._backlog.remove(*waiting.pop(slice_.request))
        super().on_scheduled(slices, now)

    def on_finished(self, request: Request, now: float) -> None:
        super().on_finished(request, now)
        if request in self._waiting:
            self._backlog.remove(*self._waiting.pop(request))

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        rank, value = self._ranking.key, self._remaining
        asked = sorted([(rank(request), request) for request in requests])
        keys = [key[0][0] for key, _ in asked]
        grain_s = _HYSTERESIS_STEPS * value.step_s
        turns: list[tuple[Any, Request]] = []
        running = 0.0
        for (_, request), key, waiting in zip(asked, keys, self._backlog.before(keys), strict=True):
            seconds = min((running + waiting) / self._batch, max(0.0, value.promoted(key) - now))
            turns.append((int(seconds / grain_s), request))
            if request not in self._waiting:
                running += value.seconds(request, request.progress.known)
        return turns

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        yield from super().explain(request, now, kv)
        (ahead_s,) = self._backlog.before([self.rank(request)[0][0]])
        meaning = "Remaining work of the requests that wait before it, shared by the requests of a step."
        yield Fact("work before it", ahead_s / self._batch, "s", meaning)

    def _place(self, request: Request, now: float) -> None:
        super()._place(request, now)
        if request in self._waiting:
            self._backlog.remove(*self._waiting[request])
        entry = self.rank(request)[0][0], self._remaining.seconds(request, request.progress.known)
        self._waiting[request] = entry
        self._backlog.add(*entry)
