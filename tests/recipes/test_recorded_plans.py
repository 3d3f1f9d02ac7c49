from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from recorded_plans import FOLDER, MAX_LINES, SCENARIOS, difference, recorded, text_of

from skipjoin.core.events import Admitted, Event, Finished, MoveFailed, Planned, Preempted, Preemption, Reserved
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import StepPlan
from support.watch import Run

# Some recorded run must have each of these, and each kind of preemption, of move and of end.
MECHANISMS = {
    "a chunk of a prompt",
    "a token that is still being sampled",
    "a prefix-cache hit",
    "a prefix-cache hit on the CPU tier",
    "a copy for the prefix cache",
    "shared blocks",
    "a copy of slots",
    "a reservation out of another request's",
    "a reservation out of an account",
    "a part of a request's KV is kept",
    "2 plans in flight",
    "2 stages",
    "3 stages",
    "best effort",
    "an urgent request",
    "priorities",
    "clients",
    "a failed move out",
    "a failed move in",
}
MOVES = {"blocking out", "blocking in", "overlapped out", "overlapped in", "blocking within"}
ENDS = {FinishReason.LENGTH, FinishReason.DEADLINE, FinishReason.ERROR}


@cache
def done(name: str) -> Run:
    return SCENARIOS[name].run()


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions_are_as_recorded(name: str) -> None:
    if text := difference(name, text_of(done(name))):
        pytest.fail(f"{text}\nIf this is meant: python tests/recipes/recorded_plans.py", pytrace=False)


def test_each_recorded_plan_has_a_scenario() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SCENARIOS)


def test_a_failure_shows_the_first_divergent_step_and_the_lines_around_it() -> None:
    name = "fastserve"
    lines = recorded(name).splitlines()
    changed = [number for number, line in enumerate(lines) if "step 5" in line or "step 30" in line]
    for number in changed:
        lines[number] += " | 99@7"
    shown = difference(name, "\n".join(lines)).splitlines()
    assert f"-{lines[changed[0]].removesuffix(' | 99@7')}" in shown
    assert f"+{lines[changed[0]]}" in shown
    assert f"+{lines[changed[1]]}" not in shown
    assert len(shown) <= MAX_LINES


def mechanisms(event: Event) -> Iterator[object]:
    match event:
        case Admitted(cached=cached, on_cpu=on_cpu) if cached:
            yield "a prefix-cache hit on the CPU tier" if on_cpu else "a prefix-cache hit"
        case Reserved(parent=Request()):
            yield "a reservation out of another request's"
        case Reserved(parent=parent, drawn=drawn) if parent is not None or drawn:
            yield "a reservation out of an account"
        case Preempted(how=how, kept=kept):
            yield how
            if kept and how is not Preemption.PAUSE:
                yield "a part of a request's KV is kept"
        case Planned(plan=plan, shared=shared):
            yield from ["shared blocks"] * (shared > 0)
            yield from mechanisms_of(plan)
        case MoveFailed(move=move):
            yield f"a failed move {move.direction.name.lower()}"
        case Finished(reason=reason):
            yield reason
        case _:
            pass


def mechanisms_of(plan: StepPlan) -> Iterator[str]:
    yield from ("a chunk of a prompt" for piece in plan.slices if not piece.samples)
    yield from ("a token that is still being sampled" for piece in plan.slices if piece.awaits)
    yield from (f"blocking {move.direction.name.lower()}" for move in plan.blocking)
    yield from (f"overlapped {move.direction.name.lower()}" for move in plan.overlapped)
    moves = (*plan.blocking, *plan.overlapped)
    yield from ("a copy for the prefix cache" for move in moves if move.request is None)
    yield from ("a copy of slots" for move in moves if move.spans)


def settings(name: str) -> Iterator[object]:
    scenario = SCENARIOS[name]
    requests = done(name).requests
    if scenario.world.overlap:
        yield "2 plans in flight"
    if scenario.world.stages > 1:
        yield f"{scenario.world.stages} stages"
    if any(request.is_best_effort for request in requests):
        yield "best effort"
    if any(request.options.is_urgent for request in requests):
        yield "an urgent request"
    if len({request.options.priority for request in requests}) > 2:
        yield "priorities"
    if len({request.options.client for request in requests}) > 2 and scenario.world.fair_output_weight is not None:
        yield "clients"


def test_recorded_runs_cover_every_mechanism() -> None:
    shown = {mechanism for name in SCENARIOS for event in done(name).events for mechanism in mechanisms(event)}
    shown |= {setting for name in SCENARIOS for setting in settings(name)}
    assert {*MECHANISMS, *MOVES, *ENDS, *Preemption} - shown == set()
