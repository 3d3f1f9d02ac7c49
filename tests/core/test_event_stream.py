from __future__ import annotations

import random
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise

import pytest

from skipjoin.core.engine import EngineCore, RequestTooLargeError
from skipjoin.core.events import (
    Admitted,
    Arrived,
    Computed,
    Event,
    Finished,
    Moved,
    MoveFailed,
    Planned,
    Preempted,
    Preemption,
    Reserved,
    Started,
    Token,
    Waited,
)
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction, StepResult
from support.load import load, make
from support.policies import EVICTIONS, SOME_SYSTEMS
from support.recipes import RECIPES
from support.watch import Run, Stepper, World, run
from support.worlds import PIPELINES, checkered, worlds

RUNS = worlds(SOME_SYSTEMS, PIPELINES[:3], parts=4)


@cache
def served(world: World) -> Run:
    return run(world, load(5, 20))


def stories(done: Run) -> dict[Request, list[Event]]:
    """Return each request's own events, without changes of its wait reason."""
    by_request: dict[Request, list[Event]] = defaultdict(list)
    for event in done.events:
        if not isinstance(event, Planned | Computed | Waited):
            by_request[event.move.request if isinstance(event, Moved | MoveFailed) else event.request].append(event)
    return by_request


def check_order(story: list[Event]) -> None:
    """Check the order Arrived, Admitted, Reserved, Started, tokens, Finished, with stops and restarts in between."""
    kinds = [type(event) for event in story]
    assert kinds[:4] == [Arrived, Admitted, Reserved, Started]
    assert kinds[-1] is Finished or set(kinds[kinds.index(Finished) :]) <= {Finished, Moved, MoveFailed}
    assert kinds.count(Arrived) == kinds.count(Finished) == 1
    assert all(one <= other for one, other in pairwise(e.now for e in story))
    running = blocks_of = False
    for event in story:
        match event:
            case Admitted():
                assert not blocks_of, "admitted twice"
                blocks_of = True
            case Started():
                assert blocks_of, "started without blocks"
                assert not running, "started twice"
                running = True
            case Preempted(how=how, kept=kept):
                # A paused request may lose its blocks later: it is not running, but holds blocks.
                assert running or how is not Preemption.PAUSE, "paused twice"
                assert blocks_of
                running = False
                blocks_of = how is not Preemption.DROP or kept > 0
            case Finished():
                running = blocks_of = False
            case _:
                pass


@pytest.mark.parametrize("world", RUNS)
def test_events_of_a_request_are_in_order_and_agree_with_the_plans(world: World) -> None:
    done = served(world)
    by_request = stories(done)
    samples: Counter[int] = Counter()
    moves: Counter[int] = Counter()
    for _, (_, slices, before, overlapped) in done.trace:
        samples.update(number for number, _, _, sampled, _, _ in slices if sampled)
        moves.update(number for _, number, _, _ in (*before, *overlapped))
    for request in done.requests:
        story = by_request[request]
        check_order(story)
        tokens = [event.token for event in story if isinstance(event, Token)]
        assert tokens == request.progress.output
        # No request stops at a token here, so no sample is discarded.
        assert len(tokens) == samples[request.id] == request.max_tokens
        assert sum(isinstance(event, Moved) for event in story) == moves[request.id]
        reasons = [e.reason for e in story if isinstance(e, Finished)]
        assert reasons == [request.progress.finish_reason] == [FinishReason.LENGTH]


@pytest.mark.parametrize(
    ("eviction", "pipeline"),
    checkered(["swap", "spill", "proactive", "chaos"], [(1, False), (2, False), (2, True)], colors=3),
)
def test_events_of_a_request_are_in_order_when_moves_fail(eviction: str, pipeline: tuple[int, bool]) -> None:
    """A failed move is part of the story, and a request that lost KV by it is preempted at that moment."""
    draw = random.Random(7)
    world = World("fastserve", *pipeline, EVICTIONS[eviction])
    done = run(world, load(5, 20), fails=lambda move: draw.random() < 0.5)
    failures = 0
    for request, story in stories(done).items():
        check_order(story)
        assert [event.token for event in story if isinstance(event, Token)] == request.progress.output
        begun = [move for _, plan in done.trace for move in (*plan[2], *plan[3]) if move[1] == request.id]
        ends = [event.move for event in story if isinstance(event, Moved | MoveFailed)]
        assert [(move.direction.name, move.source, move.target) for move in ends] == [(m[0], *m[2:]) for m in begun]
        at_once = [(event, after) for event, after in pairwise(story) if isinstance(event, MoveFailed)]
        failures += len(at_once)
        for event, after in at_once:
            if event.move.direction is Direction.IN:
                assert isinstance(after, Preempted)
                assert (after.how, after.now) == (Preemption.DROP, event.now)
    assert failures > 3


@pytest.mark.parametrize("world", RUNS)
def test_a_started_event_occurs_exactly_when_plans_begin_to_run_a_request(world: World) -> None:
    """Starts are derived from the plans alone: a request runs while one of the last `depth` plans has a slice of it.

    With overlap only the last plan counts.
    """
    done = served(world)
    window = 1 if world.overlap else world.depth
    expected: Counter[int] = Counter()
    last: dict[int, int] = {}
    evicted: set[int] = set()
    for event in done.events:
        if isinstance(event, Preempted) and event.how is not Preemption.PAUSE:
            evicted.add(event.request.id)
        elif isinstance(event, Planned):
            for piece in event.plan.slices:
                number, plan_id = piece.request.id, event.plan.id
                expected[number] += number not in last or last[number] < plan_id - window or number in evicted
                last[number] = plan_id
                evicted.discard(number)
    started = Counter(event.request.id for event in done.events if isinstance(event, Started))
    assert started == expected


@pytest.mark.parametrize("world", RUNS)
def test_steps_are_reported_in_order_with_their_used_blocks(world: World) -> None:
    done = served(world)
    planned = [event for event in done.events if isinstance(event, Planned)]
    computed = [event for event in done.events if isinstance(event, Computed)]
    assert [event.plan for event in planned] == [event.result.plan for event in computed]
    assert [(event.now, event.plan.id) for event in planned] == [(now, parts[0]) for now, parts in done.trace]
    assert all(0 < event.held <= event.reserved for event in planned)
    assert all(event.held <= world.device_blocks for event in planned)
    for before, after in zip(planned, computed, strict=True):
        assert before.now < after.now
        # A step holds the blocks that it computes.
        assert before.held >= sum(len(piece.blocks) for piece in before.plan.slices)


def test_take_events_returns_each_event_once() -> None:
    core = World().core()
    core.add(make(0), 0.0)
    assert [type(event) for event in core.take_events()] == [Arrived]
    assert core.take_events() == []


def test_details_of_the_sampler_reach_the_token_events() -> None:
    core = World().core()
    core.add(make(0), 0.0)
    core.add(make(1), 0.0)
    plan = core.start_step(0.0)
    assert plan is not None
    core.finish_step(StepResult(plan, [7, 8], 0.1, {1: "log-probability"}), 0.1)
    details = {e.request.id: e.detail for e in core.take_events() if isinstance(e, Token)}
    assert details == {0: None, 1: "log-probability"}


def end_reasons(stepper: Stepper) -> dict[int, FinishReason]:
    return {e.request.id: e.reason for e in stepper.events if isinstance(e, Finished)}


def test_a_request_whose_deadline_passes_in_the_queue_never_runs() -> None:
    stepper = Stepper(World("fcfs", max_seqs=1).core())
    stepper.add(make(0, 4, 30), make(1, 4, 30, deadline=0.055))
    while stepper.now < 0.08:
        plan = stepper.step()
        assert {piece.request.id for piece in plan.slices} == {0}
    assert end_reasons(stepper) == {1: FinishReason.DEADLINE}
    stepper.drain()


def test_a_request_whose_deadline_passed_before_arrival_never_runs() -> None:
    stepper = Stepper(World().core())
    stepper.now = 5.0
    stepper.add(make(0, deadline=5.0))
    assert stepper.start() is None
    assert end_reasons(stepper) == {0: FinishReason.DEADLINE}
    stepper.drain()


@pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, False), (2, True)])
def test_a_deadline_ends_a_running_request(depth: int, overlap: bool) -> None:
    stepper = Stepper(World(depth=depth, overlap=overlap).core())
    stepper.add(make(0, 4, 30, deadline=0.055), make(1, 4, 30))
    stepper.drain()
    assert end_reasons(stepper) == {0: FinishReason.DEADLINE, 1: FinishReason.LENGTH}
    assert 0 < len(stepper.tokens[0]) < 30
    assert len(stepper.tokens[1]) == 30
    own = [event for event in stepper.events if not isinstance(event, Moved | Planned | Computed)]
    story = [event for event in own if event.request.id == 0]
    assert isinstance(story[-1], Finished)
    assert story[-1].now == pytest.approx(0.06)


def test_next_deadline_is_the_earliest_of_live_requests() -> None:
    core = World().core()
    assert core.next_deadline == float("inf")
    core.add(make(0, deadline=3.0), 0.0)
    core.add(make(1, deadline=2.0), 0.0)
    core.add(make(2), 0.0)
    assert core.next_deadline == 2.0
    core.start_step(2.5)
    assert core.next_deadline == 3.0


def test_the_deadline_of_a_finished_request_has_no_effect() -> None:
    """The id may be used again."""
    stepper = Stepper(World().core())
    stepper.add(make(0, 4, 1, deadline=1.0))
    stepper.drain()
    stepper.add(make(0, 4, 2))
    stepper.now = 2.0
    stepper.drain()
    assert [e.reason for e in stepper.events if isinstance(e, Finished)] == [FinishReason.LENGTH] * 2


def test_deadlines_of_aborted_requests_are_removed() -> None:
    core, week = World().core(), 7 * 86_400.0
    core.add(make(0, deadline=week), 0.0)
    for number in range(1, 500):
        core.add(make(number, deadline=week / number), 0.0)
        core.abort(number, 0.0)
        assert len(core._deadlines) <= 2
    core.abort(0, 0.0)
    assert core.next_deadline == float("inf")


def test_a_stop_token_counts_once_min_tokens_are_generated() -> None:
    stepper = Stepper(World().core(), sample=lambda request, position: 7)
    stepper.add(make(0, 4, 9, stop_tokens=frozenset({7}), min_tokens=3), make(1, 4, 9, stop_tokens=frozenset({8})))
    stepper.drain()
    assert stepper.tokens == {0: [7] * 3, 1: [7] * 9}
    assert end_reasons(stepper) == {0: FinishReason.STOP, 1: FinishReason.LENGTH}


def test_a_request_with_one_prompt_token_and_one_output_token_finishes() -> None:
    stepper = Stepper(World().core())
    stepper.add(make(0, 1, 1))
    stepper.drain()
    assert stepper.tokens == {0: [1]}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_largest_request_runs_and_one_token_more_is_refused(recipe: str) -> None:
    core = World(recipe, device_blocks=10, max_tokens=16).core()
    assert core.largest_request == 40
    with pytest.raises(RequestTooLargeError, match="41 tokens"):
        core.add(make(0, 30, 11), 0.0)
    assert core.requests == {}
    assert core.take_events() == []
    stepper = Stepper(core)
    stepper.add(make(1, 30, 10), make(2, 39, 1), make(3, 1, 39))
    stepper.drain()
    assert {number: len(tokens) for number, tokens in stepper.tokens.items()} == {1: 10, 2: 1, 3: 39}


def test_an_id_in_use_is_refused_and_changes_nothing() -> None:
    stepper = Stepper(World().core())
    stepper.add(make(0, 4, 3))
    with pytest.raises(ValueError, match="request id 0 is in use"):
        stepper.add(make(0, 4, 3))
    stepper.drain()
    assert len(stepper.tokens[0]) == 3


@pytest.mark.parametrize("bad", [{"prompt": 0}, {"max_tokens": 0}])
def test_a_request_needs_a_prompt_and_a_token_to_generate(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="request 0"):
        make(0, **bad)


def test_plans_must_be_finished_in_order() -> None:
    core: EngineCore = World(depth=2, overlap=True).core()
    core.add(make(0, 4, 9), 0.0)
    first, second = core.start_step(0.0), core.start_step(0.0)
    assert first is not None
    assert second is not None
    with pytest.raises(ValueError, match="not the oldest"):
        core.scheduler.commit(StepResult(second, [1], 0.1), 0.1)
    # The refused call changed nothing: the right order still works, once.
    core.scheduler.commit(StepResult(first, [1], 0.1), 0.1)
    with pytest.raises(ValueError, match="not the oldest"):
        core.scheduler.commit(StepResult(first, [1], 0.1), 0.1)


def test_a_sample_without_a_token_is_an_error() -> None:
    core = World().core()
    core.add(make(0), 0.0)
    plan = core.start_step(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match="sampled no token"):
        core.finish_step(StepResult(plan, [None], 0.1), 0.1)


def test_abort_of_an_unknown_request_returns_false() -> None:
    core = World().core()
    assert not core.abort(3, 0.0)
    core.add(make(3), 0.0)
    assert core.abort(3, 0.0)
    assert not core.abort(3, 0.0)
    assert [type(event) for event in core.take_events()] == [Arrived, Finished]
