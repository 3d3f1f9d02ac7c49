from __future__ import annotations

import io
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from skipjoin.core.events import Computed, Event, Finished, Planned, Preempted, Preemption, Started
from skipjoin.core.request import FinishReason
from skipjoin.core.step import Direction, StageTime
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.observe.stages import StageUse
from skipjoin.observe.timeline import Timeline
from skipjoin.sim.driver import Replica, simulate
from support.load import load, make
from support.policies import SOME_SYSTEMS, UnitCost
from support.watch import Run, Stepper, World, run
from support.worlds import PIPELINES, worlds

WORLDS = worlds(SOME_SYSTEMS, PIPELINES[:4], parts=3)
PHASES = {"prefill", "decode"}
PREEMPTIONS = {how.value for how in Preemption}


@cache
def run_of(world: World) -> Run:
    return run(world, load(7, 24, rate=200.0))


def trace_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    file = io.StringIO()
    timeline = Timeline(file)
    timeline.observe(events)
    timeline.close()
    entries: list[dict[str, Any]] = json.loads(file.getvalue(), parse_float=Decimal)
    return entries


@cache
def trace_of_run(world: World) -> list[dict[str, Any]]:
    return trace_of(run_of(world).events)


def spans(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry["ph"] == "X"]


def lanes(entries: list[dict[str, Any]]) -> dict[str, list[tuple[Decimal, Decimal]]]:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    found: dict[str, list[tuple[Decimal, Decimal]]] = defaultdict(list)
    for span in spans(entries):
        found[names[span["pid"], span["tid"]]].append((span["ts"], span["ts"] + span["dur"]))
    return {name: sorted(times) for name, times in found.items()}


def max_running(events: Iterable[Event]) -> int:
    running = set()
    found = 0
    for event in events:
        if isinstance(event, Started):
            running.add(event.request)
        elif isinstance(event, Preempted | Finished):
            running.discard(event.request)
        elif isinstance(event, Planned):
            found = max(found, len(running))
    return found


def microseconds(done: Run, now: float) -> float:
    return (now - done.events[0].now) * 1e6


@pytest.mark.parametrize("world", WORLDS)
def test_the_timeline_has_every_token_step_copy_and_end_once(world: World) -> None:
    done = run_of(world)
    entries = trace_of_run(world)
    results = [event.result for event in done.events if isinstance(event, Computed)]
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans(entries):
        by_name[span["name"]].append(span)

    generated: Counter[int] = Counter()
    computed: Counter[int] = Counter()
    left: dict[int, list[str]] = defaultdict(list)
    for span in sorted((*by_name["prefill"], *by_name["decode"]), key=lambda span: span["ts"]):
        generated[span["args"]["request"]] += span["args"]["generated"]
        computed[span["args"]["request"]] += span["args"]["computed"]
        left[span["args"]["request"]].append(span["args"]["left"])
    assert generated == {request.id: len(request.progress.output) for request in done.requests}
    slices = [piece for result in results for piece in result.plan.slices]
    expected: Counter[int] = Counter()
    for piece in slices:
        expected[piece.request.id] += piece.tokens
    assert computed == expected
    for reasons in left.values():
        assert reasons[-1] == FinishReason.LENGTH.value
        assert set(reasons[:-1]) <= PREEMPTIONS | {"caught up"}

    assert [step["args"]["plan"] for step in by_name["step"]] == [result.plan.id for result in results]
    assert [step["args"]["requests"] for step in by_name["step"]] == [len(result.plan.slices) for result in results]
    assert sum(s["args"]["prefill"] + s["args"]["decodes"] for s in by_name["step"]) == sum(p.tokens for p in slices)
    ends = [microseconds(done, event.now) for event in done.events if isinstance(event, Computed)]
    assert [float(step["ts"] + step["dur"]) for step in by_name["step"]] == pytest.approx(ends)

    for direction, name in ((Direction.OUT, "out"), (Direction.IN, "in")):
        moves = [
            (move.request.id, len(move.source), when)
            for result in results
            for when, group in (("blocking", result.plan.blocking), ("overlapped", result.plan.overlapped))
            for move in group
            if move.direction is direction
        ]
        assert [(s["args"]["request"], s["args"]["blocks"], s["args"]["when"]) for s in by_name[name]] == moves


@pytest.mark.parametrize("world", WORLDS)
def test_spans_of_a_lane_never_overlap_and_lanes_are_few(world: World) -> None:
    done = run_of(world)
    found = lanes(trace_of_run(world))
    for times in found.values():
        assert all(begin <= end for begin, end in times)
        assert all(one[1] <= other[0] for one, other in pairwise(times))
    slots = [name for name in found if name.startswith("Slot")]
    assert 1 < len(slots) <= max_running(done.events) <= world.max_seqs * world.depth


@pytest.mark.parametrize("world", WORLDS)
def test_spans_of_a_request_are_bounded_by_its_steps(world: World) -> None:
    """Every span begins and ends with a step that has a slice of its request."""
    done = run_of(world)
    entries = trace_of_run(world)
    steps = {span["args"]["plan"]: span for span in spans(entries) if span["name"] == "step"}
    begins: dict[int, set[Decimal]] = defaultdict(set)
    ends: dict[int, set[Decimal]] = defaultdict(set)
    for event in done.events:
        if isinstance(event, Computed):
            step = steps[event.result.plan.id]
            for piece in event.result.plan.slices:
                begins[piece.request.id].add(step["ts"])
                ends[piece.request.id].add(step["ts"] + step["dur"])
    phases = [span for span in spans(entries) if span["name"] in PHASES]
    assert phases
    for span in phases:
        number = span["args"]["request"]
        assert span["ts"] in begins[number]
        assert span["ts"] + span["dur"] in ends[number]
    # Successive steps are one span, however many tokens they generate.
    breaks = sum(isinstance(event, Preempted | Finished) for event in done.events)
    assert len(phases) <= 2 * breaks


def stage_spans(entries: list[dict[str, Any]], number: int) -> list[tuple[str, float, float, int]]:
    """Return the name, begin and end in seconds, and plan of each span in the lane of a stage."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    return [
        (span["name"], float(span["ts"]) / 1e6, float(span["ts"] + span["dur"]) / 1e6, span["args"]["plan"])
        for span in spans(entries)
        if names[span["pid"], span["tid"]] == f"Stage {number}"
    ]


def test_every_stage_has_a_lane_with_its_parts_of_steps_and_its_bubbles() -> None:
    """The simulated executor's times are exact: two requests, then an idle second, then one request."""
    core = World("fcfs", 2, cost=UnitCost(), stages=2).core()
    events: list[Event] = []
    requests = [make(0, 4, 2), make(1, 8, 2), make(2, 4, 1, arrival=20.0)]
    executor = SimulatedExecutor(UnitCost(), stages=2)
    simulate(Replica(core, executor), requests, on_events=events.extend)
    entries = trace_of(events)
    first, second = stage_spans(entries, 0), stage_spans(entries, 1)
    for number, found in enumerate((first, second)):
        parts = [span for span in found if span[0] == "part"]
        times = [event.result.stages[number] for event in events if isinstance(event, Computed)]
        assert [end - begin for _, begin, end, _ in parts] == pytest.approx([time.busy for time in times])
        assert [plan for *_, plan in parts] == list(range(len(parts)))
        # Idle time after a rest is not a bubble.
        bubbles = sum(end - begin for name, begin, end, _ in found if name == "bubble")
        assert bubbles == pytest.approx(sum(time.idle for time in times[:-1]))
    # A part begins on the second stage only after it ended on the first.
    ended = {plan: end for name, _, end, plan in first if name == "part"}
    assert all(begin >= ended[plan] - 1e-9 for name, begin, _, plan in second if name == "part")
    use = StageUse()
    use.observe(events)
    assert (len(use.busy), sum(use.busy)) == (2, pytest.approx(4 + 8 + 2 + 4))
    assert use.idle == pytest.approx(
        [sum(end - begin for name, begin, end, _ in found if name == "bubble") for found in (first, second)]
    )


def test_without_stages_there_are_no_stage_lanes() -> None:
    done = run(World(depth=2), load(5, 10))
    assert not [name for name in lanes(trace_of(done.events)) if name.startswith("Stage")]
    use = StageUse()
    use.observe(done.events)
    assert (use.busy, use.idle) == ([], [])


def test_parts_with_inconsistent_times_do_not_overlap() -> None:
    """Clocks of ranks differ, and the driver may read results late."""
    stepper = Stepper(World("fcfs", 2, stages=2).core())
    stepper.add(*(make(number, 8, 30) for number in range(6)))
    draw = random.Random(3)
    events: list[Event] = []
    for _ in range(60):
        stepper.fill()
        stepper.finish()
    for event in stepper.events:
        if isinstance(event, Computed):
            stages = tuple(StageTime(draw.uniform(0, 0.02), draw.uniform(0, 0.02)) for _ in range(2))
            events.append(event._replace(result=replace(event.result, stages=stages)))
        else:
            events.append(event)
    found = lanes(trace_of(events))
    for name in ("Stage 0", "Stage 1"):
        assert len(found[name]) >= 60
        assert all(begin <= end for begin, end in found[name])
        assert all(one[1] <= other[0] for one, other in pairwise(found[name]))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_timeline_shows_finish_reasons(overlap: bool) -> None:
    """The requests are stopped by a token, aborted during a step, past a deadline, and aborted before they ran."""
    stepper = Stepper(World("fcfs", 1 + overlap, overlap, max_seqs=3).core())  # tokens are positions
    stepper.add(
        make(0, 8, 20, stop_tokens=frozenset({11})),
        make(1, 8, 20),
        make(2, 8, 20, deadline=0.025),
        make(3, 8, 20),
    )
    stepper.start()
    stepper.core.abort(1, stepper.now)
    stepper.core.abort(3, stepper.now)
    stepper.finish()
    stepper.drain()
    found = [span["args"] for span in spans(trace_of(stepper.events)) if span["name"] in PHASES]
    last = {args["request"]: (args["left"], args["position"]) for args in found}
    tokens = {number: sum(args["generated"] for args in found if args["request"] == number) for number in range(4)}
    assert tokens == {number: len(stepper.tokens.get(number, ())) for number in range(4)}
    assert last[0] == ("stop", 11)
    assert last[1] == ("abort", 8)
    assert last[2][0] == "deadline"
    assert set(last) == {0, 1, 2}
    assert tokens[1] == 0


def test_requests_that_still_run_at_the_end_have_spans() -> None:
    stepper = Stepper(World().core())
    stepper.add(make(0, 8, 20))
    stepper.step()
    stepper.step()
    phases = [span for span in spans(trace_of(stepper.events)) if span["name"] in PHASES]
    assert [(span["name"], span["args"]["left"]) for span in phases] == [
        ("prefill", "caught up"),
        ("decode", "still running"),
    ]


def test_the_file_is_valid_after_every_write() -> None:
    done = run(World(), load(5, 20))
    file = io.StringIO()
    timeline = Timeline(file)
    sizes = set()
    for event in done.events:
        timeline.observe([event])
        if text := file.getvalue():
            sizes.add(len(json.loads(text + "]")))
    assert len(sizes) > 1
    timeline.flush()
    flushed = json.loads(file.getvalue() + "]")
    timeline.close()
    assert json.loads(file.getvalue()) == flushed
    assert len(flushed) > max(sizes)


def test_a_timeline_without_events_has_only_metadata() -> None:
    assert {entry["ph"] for entry in trace_of([])} == {"M"}
