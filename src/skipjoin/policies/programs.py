"""Programs of many calls that are scheduled as one, such as the runs of agents."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import (
    AdmissionPolicy,
    Allocation,
    Callbacks,
    CostModel,
    Deferral,
    Fact,
    Ordering,
    is_decode_invariant,
)
from skipjoin.core.request import FinishReason, ProgramId, Request
from skipjoin.core.step import REQUEST_OF, Slice, StepShape
from skipjoin.policies.fairness import OUTPUT_WEIGHT
from skipjoin.policies.first_tokens import Alarms
from skipjoin.policies.ordering import FixedKey
from skipjoin.policies.routed import Routed

# Maximum number of idle programs that are known, and time after which an idle one is forgotten.
MAX_IDLE, FORGET_S = 4096, 3600.0
# Attained service at which levels begin, in tokens: 0, then doubling from here on.
_FIRST_EDGE, LEVELS = 2048, 20
# Hazard that is assumed for each level, and its weight in programs. Constant, it makes least attained service the best.
_PRIOR, _PRIOR_WEIGHT = 0.5, 4.0
# Number of notes of a level from which older ones count half.
_MAX_NOTES = 512
# Number of notes between changes of the order of levels.
_REFRESH = 16
# Bins of pauses: powers of 2 from 2**-4 s on.
_PAUSE_BINS, _SHORTEST_OCTAVE = 18, -4
# Cost of held blocks relative to that of renewing as much KV: a pool that is full makes steps smaller, too.
_HOLDING_WEIGHT = 2.0
# Maximum number of programs whose blocks are held, which each admission looks at.
_MAX_HELD = 256
# Number of pauses from which they are known.
_FEW_PAUSES = 8
# Share of pauses after which a program has probably ended, and the pause that is assumed at first.
_RETURNED, _ANY_PAUSE_S = 0.95, 30.0


def level_of(attained: float) -> int:
    return 0 if attained < _FIRST_EDGE else min(LEVELS - 1, 1 + int(math.log2(attained / _FIRST_EDGE)))


def _edge(level: int) -> float:
    return 0.0 if level == 0 else _FIRST_EDGE * 2.0 ** (level - 1)


class Pauses:
    """Histogram of the pauses of programs, in octaves, and the number of programs that did not call again."""

    def __init__(self) -> None:
        self._counts = [0.0] * _PAUSE_BINS
        self._total = self._ended = 0.0

    def note(self, pause_s: float) -> None:
        octave = int(math.log2(max(pause_s, 2.0**_SHORTEST_OCTAVE))) - _SHORTEST_OCTAVE
        self._counts[min(octave, _PAUSE_BINS - 1)] += 1
        self._total += 1
        if self._total > _MAX_NOTES:
            self._counts = [count / 2 for count in self._counts]
            self._total, self._ended = self._total / 2, self._ended / 2

    def note_end(self, weight: float = 1.0) -> None:
        self._ended += weight

    def most(self) -> float:
        """Return a bound in seconds that nearly all pauses keep."""
        if not self._total:
            return _ANY_PAUSE_S
        seen = 0.0
        for octave, count in enumerate(self._counts, _SHORTEST_OCTAVE):
            seen += count
            if seen >= _RETURNED * self._total:
                return float(2.0 ** (octave + 1))
        return _ANY_PAUSE_S

    def worth_holding(self, renewal_s: float) -> float:
        """Return for how long a program's blocks should be held, if `renewal_s` is the time to renew the whole pool.

        Held blocks are a share of the pool that others lack, and the KV that is lost otherwise is the same share of
        what is to be renewed. So the share cancels out.
        """
        if self._total < _FEW_PAUSES:
            return renewal_s
        left, spent, best_s, least = self._total, 0.0, 0.0, self._total * renewal_s
        for octave, count in enumerate(self._counts, _SHORTEST_OCTAVE):
            low, high = (0.0 if octave == _SHORTEST_OCTAVE else 2.0**octave), 2.0 ** (octave + 1)
            spent += count * (low + high) / 2
            left -= count
            cost = _HOLDING_WEIGHT * (spent + (left + max(0.0, self._ended)) * high) + left * renewal_s
            if cost < least:
                best_s, least = high, cost
        return best_s


class LevelIndex:
    """Gittins index of programs by level of attained service: the best ratio of chance to end to work, learned."""

    def __init__(self) -> None:
        self._ended = [0.0] * LEVELS
        self._passed = [0.0] * LEVELS
        self._notes = 0
        self._plain_work, self._plain_weight = 0.0, 0.0
        self.revision = 0
        self._refresh()

    def note(self, level: int, *, ended: bool, weight: float = 1.0) -> None:
        (self._ended if ended else self._passed)[level] += weight
        if self._ended[level] + self._passed[level] > _MAX_NOTES:
            self._ended[level] /= 2
            self._passed[level] /= 2
        self._noted()

    def note_plain(self, work: float) -> None:
        """Note the service of a request without a program."""
        self._plain_work += work
        self._plain_weight += 1
        if self._plain_weight > _MAX_NOTES:
            self._plain_work /= 2
            self._plain_weight /= 2
        self._noted()

    def _noted(self) -> None:
        self._notes += 1
        if self._notes % _REFRESH == 0:
            self._refresh()

    def _refresh(self) -> None:
        self.revision += 1
        hazards = [
            (ended + _PRIOR * _PRIOR_WEIGHT) / (ended + passed + _PRIOR_WEIGHT)
            for ended, passed in zip(self._ended, self._passed, strict=True)
        ]
        hazards[-1] = 1.0
        self.levels = [_index(hazards, level) for level in range(LEVELS)]
        self.plain = self._plain_weight / max(1.0, self._plain_work) if self._plain_weight else self.levels[0]


def _index(hazards: Sequence[float], level: int) -> float:
    alive, gain, cost, best = 1.0, 0.0, 0.0, 0.0
    for at in range(level, LEVELS):
        gain += alive * hazards[at]
        cost += alive * (_edge(at + 1) - _edge(at)) * (1 - 0.5 * hazards[at])
        best = max(best, gain / cost)
        alive *= 1 - hazards[at]
    return best


class Program:
    """What is known of a program.

    Attributes:
        arrival: Of its first call.
        live: Number of unfinished calls.
        reached: Tokens of its longest call, up to which tokens of a prompt are not new.
        waited_s: Time that its earlier calls waited for their first step.
        idle_since: End of its latest call.
    """

    __slots__ = ("arrival", "attained", "calls", "finished", "idle_since", "live", "reached", "waited_s")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.attained = self.waited_s = 0.0
        self.calls = self.live = self.reached = 0
        self.idle_since = arrival
        self.finished = False


@dataclass(slots=True)
class _Call:
    """Live call, of whose prompt `counted` tokens are no new service."""

    program: Program
    counted: int


class ProgramBook:
    """Knowledge of programs, which the orderings of all classes and clients share.

    Idle programs are forgotten after `FORGET_S`, or the longest idle ones of the owner that has most, when there are
    more than `MAX_IDLE`. So no owner makes the server forget programs of others.
    """

    def __init__(self) -> None:
        self.index = LevelIndex()
        self._programs: dict[ProgramId, Program] = {}
        self._calls: dict[Request, _Call] = {}  # live ones
        self._idle: dict[str, OrderedDict[ProgramId, None]] = {}  # by owner, longest idle ones first
        self._count = 0  # of idle programs
        self._pauses: dict[str, Pauses] = {}
        self._pending: OrderedDict[ProgramId, None] = OrderedDict()  # idle, and not known to be over

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def has_programs(self) -> bool:
        return bool(self._programs)

    def of(self, request: Request) -> Program | None:
        """Return the program of a live call."""
        call = self._calls.get(request)
        return None if call is None else call.program

    def arrived(self, request: Request, now: float) -> Program | None:
        """Add a call, unless it was added before; return its program, or None for a request without one."""
        name = request.options.program
        if name is None:
            return None
        if (call := self._calls.get(request)) is not None:
            return call.program
        self._settle(now)
        program = self._programs.get(name)
        if program is not None and not program.live:
            self._return(name, program, now)
        if program is None or (not name.is_stated and len(request.prompt) < program.reached):
            program = self._programs[name] = Program(request.arrival)
        program.live += 1
        program.calls += 1
        self._calls[request] = _Call(program, min(program.reached, len(request.prompt)))
        return program

    def serve(self, slices: Iterable[Slice]) -> None:
        for slice_ in slices:
            request = slice_.request
            if (call := self._calls.get(request)) is None:
                continue
            program, end = call.program, min(slice_.start + slice_.tokens, len(request.prompt))
            before = level_of(program.attained)
            program.attained += max(0, end - call.counted) + (OUTPUT_WEIGHT if slice_.samples else 0.0)
            call.counted = max(call.counted, end)
            for level in range(before, level_of(program.attained)):
                self.index.note(level, ended=False)

    def started(self, request: Request, now: float) -> None:
        if (program := self.of(request)) is not None:
            program.waited_s += now - request.arrival

    def finished(self, request: Request, now: float) -> None:
        """Remove a call that has finished."""
        name, call = request.options.program, self._calls.pop(request, None)
        if name is None or call is None:
            return
        program = call.program
        program.live -= 1
        program.reached = max(program.reached, request.progress.computed)
        program.idle_since = now
        if program.live or program is not self._programs.get(name):
            return
        self._idle.setdefault(name.owner, OrderedDict())[name] = None
        self._pending[name] = None
        self._count += 1
        if self._count > MAX_IDLE:
            most = max(self._idle, key=lambda owner: len(self._idle[owner]))
            self._forget(next(iter(self._idle[most])))

    def value(self, request: Request) -> float:
        """Return the index of the request's program, or of requests without one."""
        name = request.options.program
        if name is None:
            return self.index.plain
        program = call.program if (call := self._calls.get(request)) is not None else self._programs.get(name)
        return self.index.levels[0 if program is None else level_of(program.attained)]

    def returns_until(self, name: ProgramId, now: float) -> float:
        """Return the time until which an idle program has nearly certainly called again, if it does."""
        return now + self._pauses_of(name.owner).most()

    def held_until(self, name: ProgramId, renewal_s: float, now: float) -> float:
        """Return the time until which others should not take the blocks of an idle program."""
        return now + self._pauses_of(name.owner).worth_holding(renewal_s)

    def _return(self, name: ProgramId, program: Program, now: float) -> None:
        self._leave_idle(name)
        self._pauses_of(name.owner).note(now - program.idle_since)
        if program.finished:
            program.finished = False
            self.index.note(level_of(program.attained), ended=True, weight=-1.0)
            self._pauses_of(name.owner).note_end(-1.0)

    def _pauses_of(self, owner: str) -> Pauses:
        return self._pauses.setdefault(owner, Pauses())

    def _settle(self, now: float) -> None:
        """Note programs that have not called again as ended, and forget old ones."""
        while self._pending:
            name = next(iter(self._pending))
            program = self._programs[name]
            if self.returns_until(name, program.idle_since) > now:
                break
            del self._pending[name]
            program.finished = True
            self.index.note(level_of(program.attained), ended=True)
            self._pauses_of(name.owner).note_end()
        for idle in list(self._idle.values()):
            while idle and self._programs[oldest := next(iter(idle))].idle_since + FORGET_S <= now:
                self._forget(oldest)

    def _forget(self, name: ProgramId) -> None:
        self._leave_idle(name)
        del self._programs[name]

    def _leave_idle(self, name: ProgramId) -> None:
        idle = self._idle[name.owner]
        del idle[name]
        if not idle:
            del self._idle[name.owner]
        self._pending.pop(name, None)
        self._count -= 1


# How many times larger an index must be for a call to evict KV of another program.
_HYSTERESIS = 4.0
# Places of requests besides levels: calls that have waited for long, and requests without a program.
_LATE, _PLAIN = -4, -2
# Share of a prompt whose KV is found, from which a call precedes others of its level.
_FOUND_SHARE = 0.5


def _place_of(program: Program, request: Request) -> int:
    """Return an even number for calls that find their KV, an odd one for others, which rise with the level."""
    is_new = request.progress.reached < _FOUND_SHARE * len(request.prompt)
    return 2 * level_of(program.attained) + is_new


class ByProgram(Routed):
    """Ordering of programs by the learned index of their attained service, and of their calls by other orderings.

    A call has the level of its program's service when it arrives. Without other knowledge, the programs with the least
    service come first. If programs are about equally long, those that are nearly done do. Requests without a program
    have a place among levels by the service of others like them, and an ordering of their own.

    Calls of a program that has waited for `overtaking_s` in total precede all others, by the arrival of the program, as
    do requests without one that have.
    """

    def __init__(self, make: Callable[[], Ordering], book: ProgramBook, *, overtaking_s: float) -> None:
        self._make = make
        self._book = book
        self._overtaking_s = overtaking_s
        self._orderings: dict[int, Ordering] = {_PLAIN: make()}
        self._places: dict[Request, int] = {}  # of calls
        self._sizes: dict[int, int] = {}
        self._late = Alarms()
        self._waiting: set[Request] = set()  # requests that have not run yet
        self._cached: dict[Request, int] = {}  # tokens that requests without a program found
        self._positions: dict[int, int] = {_PLAIN: 0}
        self._sorted: list[Ordering] = [self._orderings[_PLAIN]]
        self._revision = book.index.revision

    @property
    def is_decode_invariant(self) -> bool:
        return not self._places and is_decode_invariant(self._orderings[_PLAIN])

    def inner(self, request: Request) -> Ordering:
        return self._orderings[self._places.get(request, _PLAIN)]

    def inners(self) -> Sequence[Ordering]:
        return self._sorted

    def on_arrived(self, request: Request, now: float) -> None:
        program = self._book.arrived(request, now)
        if program is not None:
            self._enter(request, _place_of(program, request))
        if not request.progress.was_admitted:
            waited_s = 0.0 if program is None else program.waited_s
            self._waiting.add(request)
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
        self._late.sweep(self._waiting)
        if request in self._places:
            self._leave(request)
        cached = self._cached.pop(request, None)
        if request.progress.finish_reason is None:
            return
        if request.options.program is not None:
            self._book.finished(request, now)
        elif cached is not None:
            uncached = len(request.prompt) - cached
            self._book.index.note_plain(uncached + OUTPUT_WEIGHT * len(request.progress.output))

    def ranked(self, now: float) -> Iterator[Request]:
        # Without calls of programs, the recipe's order bounds waits itself.
        for request in self._late.due(now) if self._places else ():
            if request in self._waiting:
                self.inner(request).on_finished(request, now)
                if request in self._places:
                    self._leave(request)
                self._enter(request, _LATE)
                self._orderings[_LATE].on_arrived(request, now)
        if self._places and self._revision != self._book.index.revision:
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
        return self._index_of(mine) > _HYSTERESIS * self._index_of(theirs)

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        if not self._places:
            return self._orderings[_PLAIN].expected_order(requests, now)
        by_place: dict[int, list[Request]] = {}
        for request in requests:
            by_place.setdefault(self._places.get(request, _PLAIN), []).append(request)
        return [
            ((self._positions[place], turn), request)
            for place in sorted(by_place, key=self._positions.__getitem__)
            for turn, request in self._orderings[place].expected_order(by_place[place], now)
        ]

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        if (program := self._book.of(request)) is not None:
            yield Fact("program's service", program.attained, "tokens", "New prompt tokens, and output tokens twice.")
            yield Fact("program's calls", program.calls, "calls", "Calls so far, this one included.")
            place = self._places[request]
            level = "first" if place == _LATE else place // 2
            meaning = "Range of the service when it arrived, each twice the one before. It is first after a long wait."
            yield Fact("program's level", level, "", meaning)
        yield from super().explain(request, now, kv)

    def _enter(self, request: Request, place: int) -> None:
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

    def _index_of(self, place: int) -> float:
        index = self._book.index
        return math.inf if place == _LATE else index.plain if place == _PLAIN else index.levels[place // 2]

    def _value(self, place: int) -> tuple[float, int]:
        return -self._index_of(place), place

    def _sort(self) -> None:
        self._revision = self._book.index.revision
        places = sorted(self._orderings, key=self._value)
        self._positions = {place: position for position, place in enumerate(places)}
        self._sorted = [self._orderings[place] for place in places]


class ProgramLeases(Callbacks):
    """Retention of the KV of idle programs, around the admission policy `inner`.

    Nearly all pauses of the owner's programs are shorter than a lease. In its first part, no call is admitted to the
    blocks that does not precede the program. It lasts as long as the program's return is worth idle blocks, by the
    owner's pauses and the time to compute, or swap in, the KV again.
    """

    def __init__(self, inner: AdmissionPolicy, book: ProgramBook, cost: CostModel) -> None:
        self._inner = inner
        self._book = book
        self._cost = cost
        self._renewal_s = 0.0
        self._held: dict[ProgramId, _Lease] = {}

    def keep_until(self, request: Request, now: float) -> float | None:
        name = request.options.program
        if name is None or request.progress.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return None
        until = self._book.returns_until(name, now)
        tokens, value = request.progress.computed, self._book.value(request)
        self._held.pop(name, None)
        held_until = self._book.held_until(name, self._renewal_s, now)
        self._held[name] = _Lease(tokens, min(until, held_until), value, request)
        if len(self._held) > _MAX_HELD:
            del self._held[next(iter(self._held))]
        return until

    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        if not self._renewal_s:
            self._renewal_s = self._time_to_renew(kv)
        if self._held:
            ended = [name for name, lease in self._held.items() if lease.until <= now]
            for name in ended:
                del self._held[name]
        return ()

    def on_arrived(self, request: Request, now: float) -> None:
        if request.options.program is not None:
            self._held.pop(request.options.program, None)

    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        answer, cache = self._inner.reserve(request, target, kv), kv.cache
        if not self._held or cache is None or kv.blocks_of(request) is not None or not isinstance(answer, Allocation):
            return answer
        found = kv.hit(request).held if request.progress.computed else 0
        short = answer.now + answer.spare - found - kv.available
        if short + cache.leased_blocks <= 0 or short + self._protected(request, kv, cache.leased_blocks) <= 0:
            return answer
        return Deferral.INCOMING

    def _protected(self, request: Request, kv: KVAccounts, most: int) -> int:
        """Return the number of leased blocks of programs that the request does not precede."""
        value, options = self._book.value(request), request.options
        tokens = sum(
            lease.tokens // kv.block_size
            for lease in self._held.values()
            if lease.request.options.client == options.client
            and lease.request.own_band <= request.progress.band
            and _HYSTERESIS * lease.value >= value
        )
        return min(most, tokens)

    def _time_to_renew(self, kv: KVAccounts) -> float:
        tokens = kv.device_total * kv.block_size
        renewal_s = self._cost.step(StepShape(prefill=tokens))
        # A smaller tier loses part of the KV that leaves the device.
        if (tiers := kv.tiers) is not None and tiers.cpu_total >= kv.device_total:
            renewal_s = min(renewal_s, 2 * self._cost.transfer(kv.device_total))
        return renewal_s


class _Lease(NamedTuple):
    """First part of a lease of `tokens` tokens, after the call `request`."""

    tokens: int
    until: float
    value: float
    request: Request
