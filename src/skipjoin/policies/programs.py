from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Fact, Ordering
from skipjoin.core.policy_set import is_decode_invariant
from skipjoin.core.request import Request
from skipjoin.core.step import REQUEST_OF, Slice
from skipjoin.policies.fairness import OUTPUT_WEIGHT
from skipjoin.policies.first_tokens import Alarms
from skipjoin.policies.ordering import FixedKey
from skipjoin.policies.program_book import HYSTERESIS, Program, ProgramBook, level_of
from skipjoin.policies.routed import Routed


class _Place(NamedTuple):
    """Place of requests: a level of an owner's programs, or one of `_LATE` and `_PLAIN`."""

    number: int  # twice the level, and one more for calls that do not find their KV
    owner: str


# Calls that have waited for long, and requests without a program.
_LATE, _PLAIN = _Place(-4, ""), _Place(-2, "")
# Share of a prompt whose KV is found, from which a call precedes others of its level.
_FOUND_SHARE = 0.5


def _place_of(program: Program, owner: str, request: Request) -> _Place:
    is_new = request.progress.reached < _FOUND_SHARE * len(request.prompt)
    return _Place(2 * level_of(program.attained) + is_new, owner)


class ByProgram(Routed):
    """Ordering of programs of many calls by the learned index of their service, and of their calls by other orderings.

    A call has the level of its program's service when it arrives. Without other knowledge, the programs with the least
    service come first. If an owner's programs are about equally long, those that are nearly done do. Requests without a
    program have a place among levels by the service of others like them, and an ordering of their own.

    Programs that have waited for `overtaking_s` in total and requests that came `overtaking_s` ago precede all others,
    by their arrival, also if they have run and were preempted.
    """

    def __init__(self, make: Callable[[], Ordering], book: ProgramBook, *, overtaking_s: float) -> None:
        self._make = make
        self._book = book
        self._overtaking_s = overtaking_s
        self._orderings: dict[_Place, Ordering] = {_PLAIN: make()}
        self._places: dict[Request, _Place] = {}  # of calls
        self._sizes: dict[_Place, int] = {}
        self._late = Alarms()
        self._unfinished: set[Request] = set()
        self._waiting: set[Request] = set()  # requests that have not run yet
        self._cached: dict[Request, int] = {}  # tokens that requests without a program found
        self._positions: dict[_Place, int] = {_PLAIN: 0}
        self._sorted: list[Ordering] = [self._orderings[_PLAIN]]
        self._revision = book.revision

    @property
    def is_decode_invariant(self) -> bool:
        return not self._places and is_decode_invariant(self._orderings[_PLAIN])

    def inner(self, request: Request) -> Ordering:
        return self._orderings[self._places.get(request, _PLAIN)]

    def inners(self) -> Sequence[Ordering]:
        return self._sorted

    def on_arrived(self, request: Request, now: float) -> None:
        program = self._book.arrived(request, now)
        if program is not None and request.options.program is not None:
            self._enter(request, _place_of(program, request.options.program.owner, request))
        if not request.progress.was_admitted:
            self._waiting.add(request)
        waited_s = 0.0 if program is None else program.waited_s
        self._unfinished.add(request)
        self._late.add(request.arrival + max(0.0, self._overtaking_s - waited_s), request)
        if program is None and self._book.has_programs:
            self._cached[request] = request.progress.cached
        super().on_arrived(request, now)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        if self._waiting and not self._waiting.isdisjoint(map(REQUEST_OF, slices)):
            for slice_ in slices:
                if slice_.request in self._waiting:
                    self._waiting.discard(slice_.request)
                    self._book.started(slice_.request, now)
        if not self._places:
            self._orderings[_PLAIN].on_scheduled(slices, now)
            return
        self._book.serve(slices)
        super().on_scheduled(slices, now)

    def on_finished(self, request: Request, now: float) -> None:
        super().on_finished(request, now)
        self._waiting.discard(request)
        self._unfinished.discard(request)
        self._late.sweep(self._unfinished)
        if request in self._places:
            self._leave(request)
        cached = self._cached.pop(request, None)
        if request.progress.finish_reason is None:
            return
        if request.options.program is not None:
            self._book.finished(request, now)
        elif cached is not None:
            uncached = len(request.prompt) - cached
            self._book.note_plain(uncached + OUTPUT_WEIGHT * len(request.progress.output))

    def ranked(self, now: float) -> Iterator[Request]:
        # Without calls of programs, the recipe's order bounds waits itself.
        for request in self._late.due(now) if self._places else ():
            if request in self._unfinished and self._places.get(request) != _LATE:
                self.inner(request).on_finished(request, now)
                if request in self._places:
                    self._leave(request)
                self._enter(request, _LATE)
                self._orderings[_LATE].on_arrived(request, now)
        if self._places and self._revision != self._book.revision:
            self._sort()
        return super().ranked(now)

    def rank(self, request: Request) -> tuple[int, Any]:
        place = self._places.get(request, _PLAIN)
        return self._positions[place], self._orderings[place].rank(request)

    def outranks(self, one: Request, other: Request) -> bool:
        mine, theirs = self._places.get(one, _PLAIN), self._places.get(other, _PLAIN)
        if mine == theirs == _PLAIN:
            return self._orderings[_PLAIN].outranks(one, other)
        # A call with KV has much to recompute, and an earlier first token of another one is of no use to an agent.
        return self._index_of(mine) > HYSTERESIS * self._index_of(theirs)

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        by_place: dict[_Place, list[Request]] = {}
        for request in requests:
            by_place.setdefault(self._places.get(request, _PLAIN), []).append(request)
        # Not by position, which means another place in the ordering of another client.
        keys = {place: (-self._index_of(place), place.number) for place in by_place}
        turns = [
            ((*keys[place], turn), request)
            for place in sorted(by_place, key=self._value)
            for turn, request in self._orderings[place].expected_order(by_place[place], now)
        ]
        return sorted(turns, key=itemgetter(0))

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        if (program := self._book.of(request)) is not None:
            yield Fact("program's service", program.attained, "tokens", "New prompt tokens, and output tokens twice.")
            yield Fact("program's calls", program.calls, "calls", "Calls so far, this one included.")
            place = self._places[request]
            level = "first" if place == _LATE else place.number // 2
            meaning = "Range of the service when it arrived, each twice the one before. It is first after a long wait."
            yield Fact("program's level", level, "", meaning)
        yield from super().explain(request, now, kv)

    def _enter(self, request: Request, place: _Place) -> None:
        if place not in self._orderings:
            self._orderings[place] = FixedKey(self._begun) if place == _LATE else self._make()
            self._sort()
        self._places[request] = place
        self._sizes[place] = self._sizes.get(place, 0) + 1

    def _leave(self, request: Request) -> None:
        place = self._places.pop(request)
        self._sizes[place] -= 1
        if not self._sizes[place]:
            del self._sizes[place], self._orderings[place]
            self._sort()

    def _begun(self, request: Request) -> float:
        program = self._book.of(request)
        return request.arrival if program is None else program.arrival

    def _index_of(self, place: _Place) -> float:
        if place.number >= 0:
            return self._book.index_of(place.owner).levels[place.number // 2]
        return math.inf if place == _LATE else self._book.plain.value

    def _value(self, place: _Place) -> tuple[float, _Place]:
        return -self._index_of(place), place

    def _sort(self) -> None:
        self._revision = self._book.revision
        places = sorted(self._orderings, key=self._value)
        self._positions = {place: position for position, place in enumerate(places)}
        self._sorted = [self._orderings[place] for place in places]
