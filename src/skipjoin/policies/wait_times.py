"""Estimated wait times (ALISE section 3.2): when requests that are ordered by remaining time run next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.valued import Valued

# How fast the estimate of the batch size follows the steps.
_BATCH_RATE = 0.05
# Width of a bucket at first, of logarithms of remaining times: 1 %.
_BUCKET = 0.01
# Most sums that are kept.
_BUCKETS = 256


class Backlog:
    """Seconds of work by the key of its request, as sums over buckets of equal width, which doubles where there would
    be more than `_BUCKETS`. So nothing here costs the number of requests.

    width: of a bucket at first, in the unit of the keys.
    """

    def __init__(self, width: float) -> None:
        self._width = width
        self._halvings = 0
        self._sums: dict[int, list[float]] = {}  # requests and seconds, by bucket

    def add(self, key: float, seconds: float) -> None:
        """A request has that much to do."""
        bucket = self._sums.setdefault(self._bucket(key), [0, 0.0])
        bucket[0] += 1
        bucket[1] += seconds
        while len(self._sums) > _BUCKETS:
            self._widen()

    def remove(self, key: float, seconds: float) -> None:
        """Take back what `add` was told."""
        place = self._bucket(key)
        bucket = self._sums[place]
        bucket[0] -= 1
        bucket[1] -= seconds
        if not bucket[0]:
            del self._sums[place]

    def before(self, keys: Iterable[float]) -> Iterator[float]:
        """For each of these keys, which do not fall: the seconds in the buckets before its own."""
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
    """Least remaining time first, with turns by estimated wait time (ALISE section 3.2, equations 6 and 7): the sum of
    the remaining times of those with smaller keys, `_batch` of which run at a time, or the time until its age puts the
    request before everything that is still to arrive, whichever comes first.

    Requests that did not run since they arrived, or were evicted, have keys that rest, and lie in a `Backlog`; of the
    others those count whose turns are asked for.

    hysteresis_s: turns that are less than this apart count as equal, so that KV does not move for them.
    """

    def __init__(self, value: RemainingTime, *, hysteresis_s: float = 0.25) -> None:
        super().__init__(value)
        if not hysteresis_s > 0:
            raise ValueError(f"hysteresis_s must be above 0, got {hysteresis_s}")
        self._remaining = value
        self._grain_s = hysteresis_s
        self._batch = 1.0  # requests in a step, of late
        self._backlog = Backlog(_BUCKET)
        self._waiting: dict[Request, tuple[float, float]] = {}  # what the backlog has of each request in it

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        if slices:
            self._batch += _BATCH_RATE * (len(slices) - self._batch)
        waiting = self._waiting
        for piece in slices:
            if piece.request in waiting:
                self._backlog.remove(*waiting.pop(piece.request))
        super().ran(slices, now)

    def finished(self, request: Request, now: float) -> None:
        super().finished(request, now)
        if request in self._waiting:
            self._backlog.remove(*self._waiting.pop(request))

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        rank, value = self._ranking.key, self._remaining
        asked = sorted([(rank(request), request) for request in requests])
        keys = [key[0][0] for key, _ in asked]
        turns: list[tuple[Any, Request]] = []
        running = 0.0
        for (_, request), key, waiting in zip(asked, keys, self._backlog.before(keys), strict=True):
            seconds = min((running + waiting) / self._batch, max(0.0, value.promoted(key) - now))
            turns.append((int(seconds / self._grain_s), request))
            if request not in self._waiting:
                running += value.seconds(request, request.known)
        return turns

    def _place(self, request: Request, now: float) -> None:
        super()._place(request, now)
        if request in self._waiting:
            self._backlog.remove(*self._waiting[request])
        entry = self.rank(request)[0][0], self._remaining.seconds(request, request.known)
        self._waiting[request] = entry
        self._backlog.add(*entry)
