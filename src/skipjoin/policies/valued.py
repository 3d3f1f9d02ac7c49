"""One ordering for all value functions: what changes a request's key, and what keeps the requests sorted by it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from skipjoin.core.policy import Callbacks
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.ranking import Ranking

_NEVER = math.inf


class Value(Protocol):
    """How much requests matter, as keys: the smaller, the more. Pure: keys follow from the arguments, the request and
    what `revision` stands for. An eviction leaves tokens known and takes computed ones away: it must not make a key
    smaller."""

    @property
    def revision(self) -> int:
        """Changes when answers given before no longer hold, as those of a cost model do. Asked at every step."""
        ...

    def key(self, request: Request, known: int, now: float) -> tuple[Any, ...]:
        """The key, without tie-breakers. known: the request's tokens, one that was just sampled and is not appended yet
        included. now: seconds on the driver's clock."""
        ...

    def until(self, request: Request, now: float) -> float:
        """When time alone changes the key of a request that waits, later than `now`; inf: never."""
        ...

    def tokens(self, request: Request, known: int) -> int:
        """How many tokens are known when the key changes next, more than `known`; 0: with every token from now on. A
        request that runs costs least if that is about twelve times in its life, as with bins of lengths."""
        ...


class Valued(Callbacks):
    """Requests by value, smallest key first; equal keys by arrival.

    A request gets a new key when it arrives, when it is evicted, when its forecast changes, with every chunk of its
    prompt, when it has the number of tokens that the value named, and when the time has come that the value named. When
    the value revises itself, requests that run get keys by it at once, those that wait keep theirs until one of these:
    to sort all of them again would cost the length of the queue.
    """

    def __init__(self, value: Value) -> None:
        self._value = value
        self._revision = value.revision
        self._ranking = Ranking()
        # Of requests that ran since they got KV: the known tokens at which the key changes next.
        self._changes: dict[Request, int] = {}
        # (when time changes the key, its id, the request), and of each request the entry that holds: others are passed.
        self._watch: list[tuple[float, int, Request]] = []
        self._due: dict[Request, float] = {}

    def arrived(self, request: Request, now: float) -> None:
        self._place(request, now)

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        if self._value.revision != self._revision:
            self._revision = self._value.revision
            self._changes.clear()
        change, changes, due = self._ranking.change, self._changes, self._due
        key, tokens, until = self._value.key, self._value.tokens, self._value.until
        for piece in slices:
            request = piece.request
            # The token just sampled is not appended yet. Left out, it would lower the key at an eviction, and the
            # victim could outrank the request that it made way for.
            known = request.known + piece.samples
            changes_at = changes.get(request)
            if not changes_at or known >= changes_at or piece.tokens > 1:
                change(request, (key(request, known, now), request.arrival, request.id))
                if changes_at != 0:
                    changes[request] = tokens(request, known)
                if (when := until(request, now)) != _NEVER or due:
                    self._watch_until(request, when)

    def evicted(self, request: Request, now: float) -> None:
        self._place(request, now)

    def reforecast(self, request: Request, now: float) -> None:
        self._place(request, now)

    def finished(self, request: Request, now: float) -> None:
        self._ranking.discard(request)
        self._changes.pop(request, None)
        self._due.pop(request, None)
        # Entries that no longer hold go when they come up; where that may take long, they are swept out.
        if len(self._watch) > 2 * len(self._due) + 256:
            self._watch = [entry for entry in self._watch if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._watch)

    def ranked(self, now: float) -> Iterator[Request]:
        if self._watch and self._watch[0][0] <= now:
            self._place_due(now)
        return iter(self._ranking)

    def rank(self, request: Request) -> Any:
        return self._ranking.key(request)

    def outranks(self, one: Request, other: Request) -> bool:
        return bool(self.rank(one)[0] < self.rank(other)[0])

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.rank(request)[0], request) for request in sorted(requests, key=self.rank)]

    def _place(self, request: Request, now: float) -> None:
        """Give the request a key that stays until it runs, or time changes it."""
        key = self._value.key(request, request.known, now)
        self._ranking.rest(request, (key, request.arrival, request.id))
        self._changes.pop(request, None)
        self._watch_until(request, self._value.until(request, now))

    def _watch_until(self, request: Request, when: float) -> None:
        """Give the request a new key then."""
        if when == self._due.get(request, _NEVER):
            return
        if when == _NEVER:
            del self._due[request]
            return
        self._due[request] = when
        heapq.heappush(self._watch, (when, request.id, request))

    def _place_due(self, now: float) -> None:
        """Give new keys to the requests whose keys time has changed."""
        due = []
        while self._watch and self._watch[0][0] <= now:
            when, _, request = heapq.heappop(self._watch)
            if self._due.get(request) == when:
                del self._due[request]
                due.append(request)
        for request in due:
            self._place(request, now)
