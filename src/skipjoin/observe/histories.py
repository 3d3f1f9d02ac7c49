from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from skipjoin.core.events import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Planned,
    Preempted,
    Restarted,
    Started,
    Token,
    Waited,
)
from skipjoin.core.request import Request
from skipjoin.core.waits import WaitReason
from skipjoin.observe.history import (
    RUNNING,
    Competitor,
    History,
    Interval,
    append,
    competitors,
    current_prediction,
    new_history,
    prediction_of,
)

# Time for which finished requests are kept, as operators ask about them minutes later.
KEEP_S = 600.0
# Bounds of the memory: 100,000 intervals take about 20 MB.
MAX_FINISHED = 4096
MAX_INTERVALS = 100_000
# Changes of the reason that are kept, for requests that join the tail and leave it much later.
_MAX_CHANGES = 1024


class _LiveRecord:
    __slots__ = ("history", "in_tail_since", "preempted", "request")

    def __init__(self, request: Request, history: History, now: float) -> None:
        self.request = request
        self.history = history
        self.in_tail_since: float | None = now
        self.preempted = ""  # since the current wait began


class TailReasons:
    def __init__(self) -> None:
        self._changes: deque[tuple[float, str]] = deque([(0.0, WaitReason.NOT_EXAMINED.value)], _MAX_CHANGES)

    def change(self, reason: WaitReason, now: float) -> None:
        if self._changes[-1][1] != reason.value:
            self._changes.append((now, reason.value))

    def intervals(self, since: float, until: float | None, preempted: str) -> list[Interval]:
        found: list[Interval] = []
        end = until
        for begin, reason in reversed(self._changes):
            if until is None or begin < until:
                start = max(begin, since)
                if end is None or end > start:
                    found.append(Interval(reason, start, end, preempted))
                end = start
            if begin <= since:
                break
        if end is not None and end > since:  # older changes are forgotten
            found.append(Interval(self._changes[0][1], since, end, preempted))
        return found[::-1]


class FinishedHistories:
    def __init__(
        self, *, keep_s: float = KEEP_S, max_finished: int = MAX_FINISHED, max_intervals: int = MAX_INTERVALS
    ) -> None:
        self._keep_s = keep_s
        self._max_finished = max_finished
        self._max_intervals = max_intervals
        self._histories: dict[int, History] = {}  # oldest first
        self._intervals = 0
        self.total = 0

    def add(self, history: History, now: float) -> None:
        self._histories[history.number] = history
        self._intervals += len(history.intervals)
        self.total += 1
        self._forget_old(now)

    def find(self, number: int, now: float) -> History | None:
        self._forget_old(now)
        return self._histories.get(number)

    def since(self, since: float, now: float) -> Iterator[History]:
        self._forget_old(now)
        for history in reversed(self._histories.values()):
            if history.ended is not None and history.ended < since:
                return
            yield history

    def after(self, total: int, most: int) -> list[History]:
        """Return the histories that ended since `self.total` was `total`, the newest `most` at most."""
        wanted = min(self.total - total, most, len(self._histories))
        newest = reversed(self._histories.values())
        return [history for history, _ in zip(newest, range(wanted), strict=False)]

    def _forget_old(self, now: float) -> None:
        while self._histories:
            history = next(iter(self._histories.values()))
            is_old = history.ended is not None and history.ended < now - self._keep_s
            if not is_old and len(self._histories) <= self._max_finished and self._intervals <= self._max_intervals:
                return
            del self._histories[history.number]
            self._intervals -= len(history.intervals)


class HistoryLog:
    """Folds core events into histories of live requests, and of those that finished in the last `KEEP_S` seconds."""

    def __init__(self, finished: FinishedHistories | None = None) -> None:
        self.finished = finished or FinishedHistories()
        self._live: dict[Request, _LiveRecord] = {}
        self._numbers: dict[int, _LiveRecord] = {}
        self._silent: set[Request] = set()  # without a first token on this engine
        self._tail = TailReasons()
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrive,
            Admitted: self._admit,
            Waited: self._wait,
            Planned: self._plan,
            Started: self._start,
            Preempted: self._preempt,
            Finished: self._finish,
        }

    def observe(self, events: Iterable[Event]) -> None:
        silent, handlers = self._silent, self._handlers
        for event in events:
            if type(event) is Token:
                if silent and event.request in silent:
                    silent.discard(event.request)
                    self._live[event.request].history.first_token = event.now
            elif (handle := handlers.get(type(event))) is not None:
                handle(event)
            elif type(event) is Restarted:
                self._tail.change(WaitReason.NOT_EXAMINED, event.now)

    @property
    def requests(self) -> Collection[Request]:
        return self._live.keys()

    # -- questions ----------------------------------------------------------------------------------------

    def find(self, number: int, now: float, request: Request | None = None) -> History | None:
        """Return the history of a live or recently finished request, with the current interval.

        `request` is given if it is live, as its arrival may not have been observed yet.
        """
        if (record := self._numbers.get(number)) is not None:
            return self._current(record)
        if request is not None:
            return self._current(_LiveRecord(request, new_history(request), request.arrival))
        return self.finished.find(number, now)

    def recent(self, since: float, now: float) -> Iterator[History]:
        """Yield the requests that lived after `since`: live ones, then finished ones, newest first."""
        for record in self._live.values():
            yield self._current(record)
        yield from self.finished.since(since, now)

    def competitors(self, history: History, now: float) -> list[Competitor]:
        return competitors(history, self.recent(history.arrival, now), now)

    # -- events -------------------------------------------------------------------------------------------

    def _arrive(self, event: Arrived) -> None:
        request = event.request
        history = new_history(request)
        if event.now > request.arrival:  # on its way here, or at another engine
            history.intervals.append(Interval(WaitReason.NOT_EXAMINED.value, request.arrival, event.now))
        self._live[request] = self._numbers[request.id] = _LiveRecord(request, history, event.now)
        self._silent.add(request)

    def _admit(self, event: Admitted) -> None:
        if event.is_first:
            self._live[event.request].history.cached_tokens = event.cached

    def _plan(self, event: Planned) -> None:
        self._tail.change(event.tail, event.now)

    def _wait(self, event: Waited) -> None:
        record = self._live[event.request]
        self._close(record, event.now)
        if event.reason is None:
            record.in_tail_since = event.now
        else:
            record.history.open(Interval(event.reason.value, event.now, None, record.preempted, event.short))

    def _start(self, event: Started) -> None:
        record = self._live[event.request]
        self._close(record, event.now)
        record.preempted = ""
        record.history.open(Interval(RUNNING, event.now))

    def _preempt(self, event: Preempted) -> None:
        record = self._live[event.request]
        history, name = record.history, event.how.name.lower()
        history.preemptions[name] = history.preemptions.get(name, 0) + 1
        record.preempted = name
        last = history.intervals[-1] if history.intervals else None
        if last is None or last.end is not None:
            return  # in the tail
        if last.state == RUNNING:
            self._close(record, event.now)
            record.in_tail_since = event.now
        else:
            history.intervals[-1] = last._replace(preempted=name)

    def _finish(self, event: Finished) -> None:
        request = event.request
        record = self._live.pop(request)
        del self._numbers[request.id]
        self._silent.discard(request)
        history = self._current(record)
        if history.intervals and history.intervals[-1].end is None:
            history.intervals[-1] = history.intervals[-1]._replace(end=event.now)
        history.ended, history.reason = event.now, event.reason.value
        history.prediction = prediction_of(request)  # to compare it with the output
        history.target = request.progress.target  # a target that depends on the output length may have changed
        self.finished.add(history, event.now)

    # -- inside -------------------------------------------------------------------------------------------

    def _current(self, record: _LiveRecord) -> History:
        """Return the history with progress so far. It shares nothing that changes later."""
        request, history = record.request, record.history
        intervals = list(history.intervals)
        if record.in_tail_since is not None:
            for interval in self._tail.intervals(record.in_tail_since, None, record.preempted):
                append(intervals, interval)
        return replace(
            history,
            output_tokens=len(request.progress.output),
            prediction=current_prediction(request),
            preemptions=dict(history.preemptions),
            intervals=intervals,
            omitted_s=dict(history.omitted_s),
        )

    def _close(self, record: _LiveRecord, now: float) -> None:
        if record.in_tail_since is None:
            record.history.close(now)
            return
        for interval in self._tail.intervals(record.in_tail_since, now, record.preempted):
            record.history.open(interval)
        record.in_tail_since = None
