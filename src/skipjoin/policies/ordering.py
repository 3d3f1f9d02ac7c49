"""Orderings: which requests matter most now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from skipjoin.core.policy import Callbacks, Ordering, rests
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.ranking import Ranking


class FixedKey(Callbacks):
    """By a key that never changes, smallest first; equal keys by arrival.

    key: a comparable value per request.
    """

    rests = True

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._ranking = Ranking()

    def arrived(self, request: Request, now: float) -> None:
        self._ranking.rest(request, (self._key(request), request.arrival, request.id))

    def finished(self, request: Request, now: float) -> None:
        self._ranking.discard(request)

    def ranked(self, now: float) -> Iterator[Request]:
        return iter(self._ranking)

    def rank(self, request: Request) -> Any:
        return self._ranking.key(request)

    def outranks(self, one: Request, other: Request) -> bool:
        smaller: bool = self.rank(one)[0] < self.rank(other)[0]
        return smaller

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.rank(request)[0], request) for request in sorted(requests, key=self.rank)]


class Fcfs(FixedKey):
    """First come, first served."""

    rests = True

    def __init__(self) -> None:
        super().__init__(lambda request: request.arrival)


class Prioritized(Callbacks):
    """Strict priorities around any ordering: requests of a lower `priority` number come first, and each number has
    an ordering of its own. While all requests have the same number, this is that ordering.

    make: builds the ordering of one priority number.
    """

    def __init__(self, make: Callable[[], Ordering]) -> None:
        self._make = make
        self._bands: dict[int, Ordering] = {}
        self._sorted: list[Ordering] = []
        self._sizes: dict[int, int] = {}

    @property
    def rests(self) -> bool:
        """See `skipjoin.core.policy.rests`."""
        return all(map(rests, self._sorted))

    def arrived(self, request: Request, now: float) -> None:
        number = request.options.priority
        if number not in self._bands:
            self._bands[number] = self._make()
            self._sizes[number] = 0
            self._sort()
        self._sizes[number] += 1
        self._bands[number].arrived(request, now)

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        if len(self._sorted) == 1:
            self._sorted[0].ran(slices, now)
            return
        by_band: dict[int, list[Slice]] = {}
        for piece in slices:
            by_band.setdefault(piece.request.options.priority, []).append(piece)
        for number, pieces in by_band.items():
            self._bands[number].ran(pieces, now)

    def claimed(self, request: Request, now: float) -> None:
        self._bands[request.options.priority].claimed(request, now)

    def evicted(self, request: Request, now: float) -> None:
        self._bands[request.options.priority].evicted(request, now)

    def reforecast(self, request: Request, now: float) -> None:
        self._bands[request.options.priority].reforecast(request, now)

    def finished(self, request: Request, now: float) -> None:
        number = request.options.priority
        self._bands[number].finished(request, now)
        self._sizes[number] -= 1
        # Priorities are any integers a user sends: an empty band is not kept.
        if not self._sizes[number]:
            del self._bands[number], self._sizes[number]
            self._sort()

    def ranked(self, now: float) -> Iterator[Request]:
        # All bands are asked at once: what time changes in their orders changes now, not while the result is read.
        return chain.from_iterable([band.ranked(now) for band in self._sorted])

    def rank(self, request: Request) -> tuple[int, Any]:
        return (request.options.priority, self._bands[request.options.priority].rank(request))

    def outranks(self, one: Request, other: Request) -> bool:
        if one.options.priority != other.options.priority:
            return one.options.priority < other.options.priority
        return self._bands[one.options.priority].outranks(one, other)

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        if len(self._sorted) == 1:
            return self._sorted[0].next_turns(requests, now)
        by_band: dict[int, list[Request]] = {}
        for request in requests:
            by_band.setdefault(request.options.priority, []).append(request)
        return [
            ((number, turn), request)
            for number in sorted(by_band)
            for turn, request in self._bands[number].next_turns(by_band[number], now)
        ]

    def _sort(self) -> None:
        self._sorted = [self._bands[number] for number in sorted(self._bands)]
