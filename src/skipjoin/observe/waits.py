"""Wait times of requests by reason. Those that a decision does not examine share one reason and a common clock."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, MutableSequence
from typing import NamedTuple

from skipjoin.core.events import Planned, Waited
from skipjoin.core.step import StepResult
from skipjoin.core.waits import WaitReason

REASONS = tuple(WaitReason)
"""All reasons, in the order in which seconds by reason are listed."""

_INDEX: Mapping[WaitReason, int] = {reason: index for index, reason in enumerate(REASONS)}
_DISPATCH, _NOT_EXAMINED = _INDEX[WaitReason.DISPATCH], _INDEX[WaitReason.NOT_EXAMINED]
_IN_TRANSIT, _PENDING = _INDEX[WaitReason.KV_IN_TRANSIT], _INDEX[WaitReason.TOKEN_PENDING]
# Smaller time differences are rounding errors.
_NOTHING_S = 1e-9

Mark = tuple[float, ...]  # reading of the tail's clock: seconds by reason since the engine's start


class Moment(NamedTuple):
    now: float
    decisions: int
    mark: Mark
    is_queued: bool = False  # behind plans in flight


class WaitTimes:
    """Seconds by reason of one request, and its current wait."""

    __slots__ = ("freed", "mark", "reason", "seconds", "since")

    def __init__(self) -> None:
        self.seconds: MutableSequence[float] = [0.0] * len(REASONS)
        self.freed: Moment | None = None  # when it became eligible; None while it waits
        self.mark: Mark | None = None  # set in the tail
        self.reason = _NOT_EXAMINED
        self.since = 0.0

    def __getstate__(self) -> tuple[float, ...]:
        return tuple(self.seconds)

    def __setstate__(self, seconds: tuple[float, ...]) -> None:
        self.__init__()  # type: ignore[misc]
        self.seconds = array("d", seconds)

    def by_reason(self) -> Iterator[tuple[WaitReason, float]]:
        # A step that was submitted ahead may take back slightly more than was charged to a reason.
        return zip(REASONS, (max(0.0, seconds) for seconds in self.seconds), strict=True)


class WaitLog:
    def __init__(self) -> None:
        self._total = [0.0] * len(REASONS)  # without waits in progress
        self._clock = [0.0] * len(REASONS)  # as of a request that is always in the tail
        self._tail, self._tail_since = _NOT_EXAMINED, 0.0
        self._in_tail = 0
        self._tail_marks = [0.0] * len(REASONS)  # sum over the requests in the tail
        self._waiting: set[WaitTimes] = set()  # with their own reason
        self._decisions = 0
        self._in_flight: dict[int, Moment] = {}  # decision of plans in flight, by id
        self._last: Moment | None = None  # moment of the last result

    def totals(self, now: float) -> list[float]:
        clock = self._mark(now)
        found = [
            total + self._in_tail * at - marks
            for total, at, marks in zip(self._total, clock, self._tail_marks, strict=True)
        ]
        for times in self._waiting:
            found[times.reason] += now - times.since
        return found

    # -- events -------------------------------------------------------------------------------------------

    def arrived(self, arrival: float, now: float) -> WaitTimes:
        times = WaitTimes()
        self.resumed(times, {WaitReason.NOT_EXAMINED: now - arrival}, now)
        return times

    def resumed(self, times: WaitTimes, waited: Mapping[WaitReason, float], now: float) -> None:
        """Add a request that comes from another engine's log, which it left `waited` seconds by reason ago."""
        for reason, seconds in waited.items():
            self._add(times, _INDEX[reason], seconds)
        times.freed = None
        self._enter_tail(times, now)

    def waited(self, times: WaitTimes, event: Waited) -> None:
        freed = times.freed
        if freed is not None and freed.decisions == self._decisions:
            since = freed.now  # the first decision since its last step, so the reason applies from the start
        else:
            self._leave(times, event.now, self._mark(event.now))
            since = event.now
        times.freed = None
        if event.reason is None:
            self._enter_tail(times, event.now)
            return
        times.reason, times.since = _INDEX[event.reason], since
        self._waiting.add(times)

    def started(self, times: WaitTimes, now: float) -> None:
        if times.freed is None:
            mark = self._mark(now)
            self._leave(times, now, mark)
            times.freed = Moment(now, self._decisions, mark)

    def planned(self, event: Planned) -> None:
        self._decisions += 1
        mark = self._mark(event.now)
        self._in_flight[event.plan.id] = Moment(event.now, self._decisions, mark, is_queued=bool(self._in_flight))
        self._tail = _INDEX[event.tail]

    def computed(self, result: StepResult, now: float) -> StepWaits:
        chosen = self._in_flight.pop(result.plan.id)
        waits = StepWaits(self, chosen, self._last, Moment(now, self._decisions, self._mark(now)), result)
        self._last = waits.freed
        return waits

    def decoded(self, steps: int, end: float) -> Moment:
        self._decisions += steps
        self._last = Moment(end, self._decisions, self._mark(end))
        return self._last

    def finished(self, times: WaitTimes, now: float) -> None:
        if times.freed is not None:  # a plan in flight held it, or it finished with its last step
            self._add(times, _DISPATCH, now - times.freed.now)
        else:
            self._leave(times, now, self._mark(now))

    def restarted(self) -> None:
        self._in_flight.clear()
        self._last = None

    # -- inside -------------------------------------------------------------------------------------------

    def resume(self, times: WaitTimes, chosen: Moment, begin: float) -> None:
        freed = times.freed
        since = chosen.now if freed is None else freed.now
        if freed is None or chosen.decisions > freed.decisions + 1:
            self._leave(times, chosen.now, chosen.mark)
            since = chosen.now
        self._add(times, _PENDING if chosen.is_queued else _DISPATCH, begin - since)

    def _leave(self, times: WaitTimes, now: float, mark: Mark) -> None:
        if times.freed is not None or times.mark is not None:
            before = times.mark if times.freed is None else times.freed.mark
            assert before is not None
            for index, (start, end) in enumerate(zip(before, mark, strict=True)):
                if end != start:
                    self._add(times, index, end - start)
        if times.mark is not None:
            self._in_tail -= 1
            self._tail_marks = [a - b for a, b in zip(self._tail_marks, times.mark, strict=True)]
            times.mark = None
        elif times in self._waiting:
            self._waiting.discard(times)
            self._add(times, times.reason, now - times.since)

    def _enter_tail(self, times: WaitTimes, now: float) -> None:
        times.mark = self._mark(now)
        self._in_tail += 1
        self._tail_marks = [a + b for a, b in zip(self._tail_marks, times.mark, strict=True)]

    def _mark(self, now: float) -> Mark:
        self._clock[self._tail] += now - self._tail_since
        self._tail_since = now
        return tuple(self._clock)

    def _add(self, times: WaitTimes, index: int, seconds: float) -> None:
        if abs(seconds) > _NOTHING_S:
            times.seconds[index] += seconds
            self._total[index] += seconds

    def add_moving(self, times: WaitTimes, seconds: float) -> None:
        self._add(times, _IN_TRANSIT, seconds)


class StepWaits:
    __slots__ = ("_begin", "_chosen", "_gap", "_is_serial", "_last", "_log", "_moving", "freed")

    def __init__(self, log: WaitLog, chosen: Moment, last: Moment | None, freed: Moment, result: StepResult) -> None:
        self._log = log
        self._chosen = chosen
        self._last = last
        self.freed = freed
        self._begin = freed.now - result.seconds
        self._moving = result.moving
        # A request that also ran in the previous step waits for dispatch only, or not at all.
        self._gap = last is not None and abs(self._begin - last.now) > _NOTHING_S
        # On one device steps are serial. A step that was submitted ahead begins before the previous result is
        # committed, so the excess charged for that one is taken back. With pipeline stages, a request's steps overlap.
        self._is_serial = not result.stages

    def ran(self, times: WaitTimes) -> None:
        freed, begin = times.freed, self._begin
        if freed is not None and not self._is_serial:
            begin = max(begin, freed.now)
        if freed is None or freed is not self._last or self._gap:
            self._log.resume(times, self._chosen, begin)
        if self._moving:
            self._log.add_moving(times, max(0.0, self._begin + self._moving - begin))
        times.freed = self.freed
