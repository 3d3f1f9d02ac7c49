from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from skipjoin.core.events import Arrived, Computed, Event, Finished, Planned, Preempted, Restarted, Token
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction, Move, Slice, StepPlan, StepResult
from skipjoin.observe.residency import Residency
from skipjoin.observe.stages import Rests

# Process and thread ids of the trace format, shown as groups and lanes. Thread ids start at 1 and are unique across
# processes, because some viewers require it.
Lane = tuple[int, int]
_ENGINE, _BATCH, _PIPELINE = 1, 2, 3
_STEPS, _OUT, _IN = (_ENGINE, 1), (_ENGINE, 2), (_ENGINE, 3)
_FIRST_SLOT = 4
_FIRST_STAGE = 1 << 20  # above any number of slots
# Number of events written at once, so that the file always ends at an event boundary.
_CHUNK = 256


class TraceFile:
    """Streaming writer of Chrome's trace format, a JSON array of events. Times are in nanoseconds.

    Without `close` the file lacks the closing bracket, which viewers accept.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: list[str] = []
        self._lead = "[\n"

    def group(self, pid: int, name: str) -> None:
        self._add({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})

    def lane(self, lane: Lane, name: str) -> None:
        """Name a lane. Viewers sort lanes by thread id."""
        pid, tid = lane
        for kind, args in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": tid})):
            self._add({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    def span(self, lane: Lane, name: str, begin: int, end: int, args: dict[str, Any]) -> None:
        pid, tid = lane
        times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
        self._add({"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": args})

    def counter(self, pid: int, name: str, at: int, value: int) -> None:
        self._add({"ph": "C", "name": name, "pid": pid, "ts": at / 1000, "args": {"value": value}})

    def flush(self) -> None:
        if self._lines:
            self._file.write(self._lead + ",\n".join(self._lines))
            self._file.flush()
            self._lines.clear()
            self._lead = ",\n"

    def close(self) -> None:
        self.flush()
        self._file.write("\n]\n")
        self._file.flush()

    def _add(self, event: dict[str, Any]) -> None:
        self._lines.append(json.dumps(event, separators=(",", ":")))
        if len(self._lines) >= _CHUNK:
            self.flush()


@dataclass(slots=True)
class _Span:
    slot: int
    phase: str
    begin: int
    end: int
    computed: int = 0
    generated: int = 0
    position: int = 0


@dataclass(slots=True)
class _Track:
    span: _Span | None = None
    plans: int = 0
    leaving: str | None = None


class _Flight(NamedTuple):
    plan: StepPlan
    decided: int
    preempted: list[Preempted]


class Timeline:
    """Trace writer of one engine, driven by core events. Methods that write to the file raise OSError on failure.

    There is one lane per batch slot, one for steps and one per copy direction. A request has one span per uninterrupted
    phase, in the lowest free slot; `left` says why it ended. With pipeline stages, each stage has a lane with its part
    of every step and with bubbles, drawn as early as its lane, the decision and the next stage allow.
    """

    def __init__(self, file: TextIO) -> None:
        self._trace = TraceFile(file)
        self._origin: float | None = None  # time of the first event
        self._tracks: dict[Request, _Track] = {}
        self._free_slots: list[int] = []
        self._slots = 0
        self._in_flight: deque[_Flight] = deque()
        self._preempted: list[Preempted] = []  # since the last plan
        self._step_end = 0
        self._rests = Rests()
        self._stage_ends: list[int] = []  # end of the last part per stage
        self._residency = Residency()
        self._shown: dict[str, int] = {}
        self._trace.group(_ENGINE, "Engine")
        self._trace.lane(_STEPS, "Steps")
        self._trace.lane(_OUT, "Copies out, to CPU memory")
        self._trace.lane(_IN, "Copies in, to the device")
        self._trace.group(_BATCH, "Batch")

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            after_rest = self._rests.observe(event)
            self._residency.observe(event)
            if isinstance(event, Token):
                span = self._tracks[event.request].span
                assert span is not None
                span.generated += 1
            elif isinstance(event, Computed):
                self._compute(event, after_rest)
            elif isinstance(event, Planned):
                self._plan(event)
            elif isinstance(event, Preempted):
                self._preempted.append(event)
            elif isinstance(event, Arrived):
                self._tracks[event.request] = _Track()
                self._at(event.now)  # sets the origin
            elif isinstance(event, Finished):
                self._finish(event)
            elif isinstance(event, Restarted):
                self._restart(event)

    def flush(self) -> None:
        self._trace.flush()

    def close(self) -> None:
        for request, track in self._tracks.items():
            self._vacate(request, track, "still running")
        self._trace.close()

    def _at(self, now: float) -> int:
        if self._origin is None:
            self._origin = now
        return round((now - self._origin) * 1e9)

    # -- steps --------------------------------------------------------------------------------------------

    def _plan(self, event: Planned) -> None:
        at = self._at(event.now)
        self._in_flight.append(_Flight(event.plan, at, self._preempted))
        self._preempted = []
        for slice_ in event.plan.slices:
            self._tracks[slice_.request].plans += 1
        self._show(at, held=event.held, reserved=event.reserved)

    def _restart(self, event: Restarted) -> None:
        at = self._at(event.now)
        while self._in_flight:
            self._settle(self._in_flight.popleft().plan)
        for request, track in self._tracks.items():
            self._vacate(request, track, "lost in a restart")
        self._step_end = at
        self._trace.span(_STEPS, "restart", at, at, {"plans": len(event.plans)})
        self._show(at, held=0, reserved=0)

    def _compute(self, event: Computed, after_rest: bool) -> None:
        result = event.result
        flight = self._in_flight.popleft()
        end = self._at(event.now)
        # Steps run one after the other, even if they were decided ahead.
        begin = min(end, max(flight.decided, self._step_end, end - round(result.seconds * 1e9)))
        self._step_end = end
        for preempted in flight.preempted:
            # The request may have finished before the plan ran.
            if (track := self._tracks.get(preempted.request)) is not None:
                self._vacate(preempted.request, track, preempted.how.value)
        prefill = decodes = 0
        for slice_ in flight.plan.slices:
            is_decode = slice_.tokens == 1 and slice_.samples and slice_.start >= len(slice_.request.prompt)
            decodes += is_decode
            prefill += 0 if is_decode else slice_.tokens
            if (track := self._tracks.get(slice_.request)) is not None:
                self._extend(track, slice_, "decode" if is_decode else "prefill", begin, end)
        self._settle(flight.plan)
        batch = {"plan": flight.plan.id, "requests": len(flight.plan.slices), "prefill": prefill, "decodes": decodes}
        self._trace.span(_STEPS, "step", begin, end, batch)
        self._copies(result, begin, end)
        if result.stages:
            self._draw_stages(result, flight.decided, end, after_rest)

    def _draw_stages(self, result: StepResult, decided: int, end: int, after_rest: bool) -> None:
        if not self._stage_ends:
            self._trace.group(_PIPELINE, "Pipeline")
            for number in range(len(result.stages)):
                self._trace.lane(_lane_of_stage(number), f"Stage {number}")
        ends = self._stage_ends or [decided] * len(result.stages)
        parts: list[tuple[int, int, int]] = []
        # Backward from the last stage, because only its end is known.
        latest = end
        for busy, idle in reversed(result.stages):
            last = ends[len(result.stages) - 1 - len(parts)]
            duration = round(busy * 1e9)
            wanted = max(last + round(idle * 1e9), decided) if self._stage_ends else end
            begin = max(last, min(wanted, latest - duration))
            parts.append((last, begin, min(begin + duration, latest)))
            latest = begin
        for number, (last, begin, stop) in enumerate(reversed(parts)):
            lane, args = _lane_of_stage(number), {"plan": result.plan.id, "requests": len(result.plan.slices)}
            if begin > last and not after_rest:
                self._trace.span(lane, "bubble", last, begin, {"plan": result.plan.id})
            self._trace.span(lane, "part", begin, stop, args)
        self._stage_ends = [stop for _, _, stop in reversed(parts)]

    def _settle(self, plan: StepPlan) -> None:
        for slice_ in plan.slices:
            track = self._tracks.get(slice_.request)
            if track is None:
                continue
            track.plans -= 1
            if track.leaving is not None and not track.plans:
                self._leave(slice_.request, track.leaving)

    def _copies(self, result: StepResult, begin: int, end: int) -> None:
        plan = result.plan
        for direction, lane, name in ((Direction.OUT, _OUT, "out"), (Direction.IN, _IN, "in")):
            before = [move for move in plan.blocking if move.direction is direction]
            overlapped = [move for move in plan.overlapped if move.direction is direction]
            middle = begin + round(result.moving * 1e9)
            if not result.moving:  # the executor does not measure moves separately
                middle = begin + (end - begin) * _blocks(before) // max(1, _blocks(before) + _blocks(overlapped))
            middle = min(middle, end)
            self._share(before, (lane, name, "blocking"), begin, middle)
            self._share(overlapped, (lane, name, "overlapped"), middle, end)

    def _share(self, moves: Sequence[Move], place: tuple[Lane, str, str], begin: int, end: int) -> None:
        lane, name, when = place
        total, done, since = max(1, _blocks(moves)), 0, begin
        for move in moves:
            done += len(move.source)
            until = begin + (end - begin) * done // total
            args: dict[str, Any] = {
                "request": move.request.id if move.request is not None else None,
                "blocks": len(move.source),
                "when": when,
            }
            self._trace.span(lane, name, since, until, args)
            since = until

    # -- requests -----------------------------------------------------------------------------------------

    def _extend(self, track: _Track, slice_: Slice, phase: str, begin: int, end: int) -> None:
        span = track.span
        if span is None:
            span = track.span = _Span(self._take_slot(), phase, begin, end)
        elif span.phase != phase:
            self._write(slice_.request, span, "caught up")
            span = track.span = _Span(span.slot, phase, begin, end)
        span.end = end
        span.computed += slice_.tokens
        span.position = slice_.start + slice_.tokens

    def _finish(self, event: Finished) -> None:
        request, track, at = event.request, self._tracks[event.request], self._at(event.now)
        if track.plans and event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            track.leaving = event.reason.value  # its span ends with the step in flight
        else:
            self._leave(request, event.reason.value)
        if not self._residency.live:
            self._show(at, held=0, reserved=0)

    def _leave(self, request: Request, why: str) -> None:
        self._vacate(request, self._tracks.pop(request), why)

    def _vacate(self, request: Request, track: _Track, why: str) -> None:
        if track.span is not None:
            self._write(request, track.span, why)
            heapq.heappush(self._free_slots, track.span.slot)
            track.span = None

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._slots += 1
        self._trace.lane(_lane_of(self._slots - 1), f"Slot {self._slots}")
        return self._slots - 1

    def _write(self, request: Request, span: _Span, why: str) -> None:
        args = {
            "request": request.id,
            "computed": span.computed,
            "generated": span.generated,
            "position": span.position,
            "left": why,
        }
        self._trace.span(_lane_of(span.slot), span.phase, span.begin, span.end, args)

    def _show(self, at: int, *, held: int, reserved: int) -> None:
        running = len(self._residency.running)
        for name, value in (
            ("KV blocks held", held),
            ("KV blocks reserved", reserved),
            ("requests running", running),
            ("requests waiting", len(self._residency.live) - running),
        ):
            if self._shown.get(name) != value:
                self._shown[name] = value
                self._trace.counter(_ENGINE, name, at, value)


def _lane_of(slot: int) -> Lane:
    return _BATCH, _FIRST_SLOT + slot


def _lane_of_stage(number: int) -> Lane:
    return _PIPELINE, _FIRST_STAGE + number


def _blocks(moves: Sequence[Move]) -> int:
    return sum(len(move.source) for move in moves)
