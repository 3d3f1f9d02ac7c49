"""What is known of programs of many calls, such as the runs of agents: their service, pauses and ends."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skipjoin.core.request import ProgramId, Request
from skipjoin.core.step import Slice
from skipjoin.policies.fairness import OUTPUT_WEIGHT

# Maximum number of idle programs that are known, and time after which an idle one is forgotten.
MAX_IDLE, FORGET_S = 4096, 3600.0
# Maximum number of owners of whose programs something is learned.
MAX_OWNERS = 1024
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
# How many times larger an index must be for a call to evict KV of another program.
HYSTERESIS = 4.0
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
        self._refresh()

    def note(self, level: int, *, ended: bool, weight: float = 1.0) -> bool:
        """Note a program that ended in a level or passed it, and return whether the index has changed."""
        (self._ended if ended else self._passed)[level] += weight
        if self._ended[level] + self._passed[level] > _MAX_NOTES:
            self._ended[level] /= 2
            self._passed[level] /= 2
        self._notes += 1
        if self._notes % _REFRESH:
            return False
        self._refresh()
        return True

    def _refresh(self) -> None:
        hazards = [
            (ended + _PRIOR * _PRIOR_WEIGHT) / (ended + passed + _PRIOR_WEIGHT)
            for ended, passed in zip(self._ended, self._passed, strict=True)
        ]
        hazards[-1] = 1.0
        self.levels = [_index(hazards, level) for level in range(LEVELS)]


def _index(hazards: Sequence[float], level: int) -> float:
    alive, gain, cost, best = 1.0, 0.0, 0.0, 0.0
    for at in range(level, LEVELS):
        gain += alive * hazards[at]
        cost += alive * (_edge(at + 1) - _edge(at)) * (1 - 0.5 * hazards[at])
        best = max(best, gain / cost)
        alive *= 1 - hazards[at]
    return best


class PlainIndex:
    """Index of requests without a program: the inverse of their mean service, that of a new program at first."""

    def __init__(self) -> None:
        self._work, self._weight, self._notes = 0.0, 0.0, 0
        self.value = LevelIndex().levels[0]

    def note(self, work: float) -> bool:
        """Note the service of a request, and return whether the index has changed."""
        self._work += work
        self._weight += 1
        if self._weight > _MAX_NOTES:
            self._work /= 2
            self._weight /= 2
        self._notes += 1
        if self._notes % _REFRESH:
            return False
        self.value = self._weight / max(1.0, self._work)
        return True


class Program:
    __slots__ = ("arrival", "attained", "calls", "finished", "idle_since", "live", "reached", "waited_s")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival  # of its first call
        self.attained = 0.0
        self.waited_s = 0.0  # time that its calls waited for their first step
        self.calls = self.live = 0  # number of its calls, and of unfinished ones
        self.reached = 0  # tokens of its longest call, up to which tokens of a prompt are not new
        self.idle_since = arrival  # end of its latest call
        self.finished = False


@dataclass(slots=True)
class _Call:
    program: Program
    counted: int  # tokens of its prompt that are no new service


class _Habits:
    """What is learned from an owner's programs, and says nothing about those of others."""

    __slots__ = ("index", "pauses")

    def __init__(self) -> None:
        self.index = LevelIndex()
        self.pauses = Pauses()


class ProgramBook:
    """Knowledge of programs, which the orderings of all classes and clients share.

    Idle programs are forgotten after `FORGET_S`, or the longest idle ones of the owner that has most, when there are
    more than `MAX_IDLE`. So no owner makes the server forget programs of others, or judge them by its own: what is
    learned of programs is learned by owner, of the latest `MAX_OWNERS`.
    """

    def __init__(self) -> None:
        self.plain = PlainIndex()  # of all owners
        self.revision = 0  # changes with each change of an index
        self._habits: OrderedDict[str, _Habits] = OrderedDict()  # by owner, the latest last
        self._programs: dict[ProgramId, Program] = {}
        self._calls: dict[Request, _Call] = {}  # live ones
        self._idle: dict[str, OrderedDict[ProgramId, None]] = {}  # by owner, longest idle ones first
        self._count = 0  # of idle programs
        self._pending: dict[str, OrderedDict[ProgramId, None]] = {}  # idle ones that are not known to be over

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def has_programs(self) -> bool:
        return bool(self._programs)

    def of(self, request: Request) -> Program | None:
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
        self._habits_of(name.owner)
        self._habits.move_to_end(name.owner)
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
            if (after := level_of(program.attained)) == before or request.options.program is None:
                continue
            index = self.index_of(request.options.program.owner)
            for level in range(before, after):
                self.revision += index.note(level, ended=False)

    def started(self, request: Request, now: float) -> None:
        if (program := self.of(request)) is not None:
            program.waited_s += now - request.arrival

    def finished(self, request: Request, now: float) -> None:
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
        self._pending.setdefault(name.owner, OrderedDict())[name] = None
        self._count += 1
        if self._count > MAX_IDLE:
            most = max(self._idle, key=lambda owner: len(self._idle[owner]))
            self._forget(next(iter(self._idle[most])))

    def value(self, request: Request) -> float:
        name = request.options.program
        if name is None:
            return self.plain.value
        program = call.program if (call := self._calls.get(request)) is not None else self._programs.get(name)
        return self.index_of(name.owner).levels[0 if program is None else level_of(program.attained)]

    def index_of(self, owner: str) -> LevelIndex:
        return self._habits_of(owner).index

    def note_plain(self, work: float) -> None:
        self.revision += self.plain.note(work)

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
            self._note_end(name, program, -1.0)

    def _note_end(self, name: ProgramId, program: Program, weight: float) -> None:
        self.revision += self.index_of(name.owner).note(level_of(program.attained), ended=True, weight=weight)
        self._pauses_of(name.owner).note_end(weight)

    def _pauses_of(self, owner: str) -> Pauses:
        return self._habits_of(owner).pauses

    def _habits_of(self, owner: str) -> _Habits:
        if (found := self._habits.get(owner)) is None:
            found = self._habits[owner] = _Habits()
            if len(self._habits) > MAX_OWNERS:
                self._habits.popitem(last=False)
        return found

    def _settle(self, now: float) -> None:
        """Note programs that have not called again as ended, and forget old ones."""
        for pending in list(self._pending.values()):
            self._settle_owner(pending, now)
        for idle in list(self._idle.values()):
            while idle and self._programs[oldest := next(iter(idle))].idle_since + FORGET_S <= now:
                self._forget(oldest)

    def _settle_owner(self, pending: OrderedDict[ProgramId, None], now: float) -> None:
        while pending:
            name = next(iter(pending))
            program = self._programs[name]
            if self.returns_until(name, program.idle_since) > now:
                break
            self._leave(self._pending, name)
            program.finished = True
            self._note_end(name, program, 1.0)

    def _forget(self, name: ProgramId) -> None:
        self._leave_idle(name)
        del self._programs[name]

    def _leave_idle(self, name: ProgramId) -> None:
        self._leave(self._idle, name)
        if name in self._pending.get(name.owner, ()):
            self._leave(self._pending, name)
        self._count -= 1

    @staticmethod
    def _leave(groups: dict[str, OrderedDict[ProgramId, None]], name: ProgramId) -> None:
        names = groups[name.owner]
        del names[name]
        if not names:
            del groups[name.owner]
