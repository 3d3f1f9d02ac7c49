from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import le, sub
from typing import Any, Protocol

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Fact
from skipjoin.core.policy_set import explanation
from skipjoin.core.request import Request
from skipjoin.core.step import REQUEST_OF, START_OF, TOKENS_OF, Slice
from skipjoin.policies.ranking import Ranked

_NEVER = math.inf
# A key that lasts this many tokens is inserted into the sorted list, which costs as much as sorting it in some steps.
_STABLE_TOKENS = 4


class Value(Protocol):
    """Value function of requests: the smaller the key, the higher the rank.

    It is pure: keys follow from the arguments, the request and `revision`. An eviction, which keeps known tokens and
    removes computed ones, must not make a key smaller.
    """

    @property
    def revision(self) -> int:
        """Changes when earlier results no longer hold. Read in every step."""

    def key(self, request: Request, known: int, now: float) -> tuple[Any, ...]:
        """Return the key without tie-breakers, at `known` tokens, including one just sampled."""

    def until(self, request: Request, now: float) -> float:
        """Return when, after `now`, time alone changes the key of a waiting request, or inf."""

    def tokens(self, request: Request, known: int) -> int:
        """Return the number of known tokens at which the key changes next, or 0 for every token from now on."""


class Valued(Ranked):
    """Ordering by value, smallest key first, with ties by arrival.

    A key is computed on arrival, eviction, a changed forecast, every prompt chunk, and at the token counts and times
    that the value names. After a revision, waiting requests keep their keys until then.
    """

    def __init__(self, value: Value) -> None:
        super().__init__()
        self._value = value
        self._revision = value.revision
        # For requests that ran since they got KV: known tokens at the next change of the key.
        self._changes: dict[Request, int] = {}
        self._changes_often = False  # whether some keys change with every token
        # (time at which the key changes, request id, request); entries that differ from `_due` are stale.
        self._watch: list[tuple[float, int, Request]] = []
        self._due: dict[Request, float] = {}

    def on_arrived(self, request: Request, now: float) -> None:
        self._place(request, now)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        if self._value.revision != self._revision:
            self._revision = self._value.revision
            self._changes.clear()
        ranking, changes, due = self._ranking, self._changes, self._due
        key, tokens, until = self._value.key, self._value.tokens, self._value.until
        for slice_ in slices if self._changes_often else self._changing(slices):
            request = slice_.request
            # Include the just-sampled token, which is not appended yet. Without it an eviction would lower the key, and
            # the victim could outrank the request that preempted it.
            known = request.progress.known + slice_.samples
            changes_at = changes.get(request)
            if not changes_at or known >= changes_at or slice_.tokens > 1:
                if changes_at != 0:
                    changes_at = changes[request] = tokens(request, known)
                    self._changes_often = self._changes_often or not changes_at
                new = (key(request, known, now), request.arrival, request.id)
                if changes_at >= known + _STABLE_TOKENS:
                    ranking.set_stable(request, new)
                else:
                    ranking.set_volatile(request, new)
                self._moved(request, known)
                if (when := until(request, now)) != _NEVER or due:
                    self._watch_until(request, when)

    def _moved(self, request: Request, known: int) -> None:
        """Called after a request that ran got another key, at `known` tokens with one just sampled."""

    def _changing(self, slices: Sequence[Slice]) -> list[Slice]:
        changes_at = self._changes.get
        # The slice of a decode begins one token before the last known one, and another one is sampled.
        if sum(map(TOKENS_OF, slices)) == len(slices):  # as in most steps, which need no bytecode for each
            ends = map(changes_at, map(REQUEST_OF, slices), repeat(0))
            return [*compress(slices, map(le, map(sub, ends, repeat(2)), map(START_OF, slices)))]
        return [slice_ for slice_ in slices if changes_at(slice_[0], 0) <= slice_[1] + 2 or slice_[2] > 1]

    def on_preempted(self, request: Request, now: float) -> None:
        self._place(request, now)

    def on_reforecast(self, request: Request, now: float) -> None:
        self._place(request, now)

    def on_finished(self, request: Request, now: float) -> None:
        self._ranking.discard(request)
        self._changes.pop(request, None)
        self._due.pop(request, None)
        # Stale entries are dropped when due; sweep them when they outnumber the valid ones.
        if len(self._watch) > 2 * len(self._due) + 256:
            self._watch = [entry for entry in self._watch if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._watch)

    def ranked(self, now: float) -> Iterator[Request]:
        if self._watch and self._watch[0][0] <= now:
            self._place_due(now)
        return super().ranked(now)

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterable[Fact]:
        return explanation(self._value, request, now, kv)

    def _place(self, request: Request, now: float) -> None:
        key = self._value.key(request, request.progress.known, now)
        self._ranking.set_stable(request, (key, request.arrival, request.id))
        self._changes.pop(request, None)
        self._watch_until(request, self._value.until(request, now))

    def _watch_until(self, request: Request, when: float) -> None:
        if when == self._due.get(request, _NEVER):
            return
        if when == _NEVER:
            del self._due[request]
            return
        self._due[request] = when
        heapq.heappush(self._watch, (when, request.id, request))

    def _place_due(self, now: float) -> None:
        due = []
        while self._watch and self._watch[0][0] <= now:
            when, _, request = heapq.heappop(self._watch)
            if self._due.get(request) == when:
                del self._due[request]
                due.append(request)
        for request in due:
            self._age(request, now)

    def _age(self, request: Request, now: float) -> None:
        self._place(request, now)
