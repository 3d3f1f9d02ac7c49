from __future__ import annotations

from dataclasses import replace

import pytest

from skipjoin.core.context import StepContext
from skipjoin.core.events import Arrived, Event, Finished, Token
from skipjoin.core.refusals import HELD, Refusal
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction, Move, Slice, StepPlan
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.dispatch import DISPATCH_RULES, Dispatch, make_dispatch
from skipjoin.policies.predictors import longest_output
from skipjoin.sim.driver import Replica, StalledError, simulate, simulate_cluster
from support.load import load, make
from support.policies import UnitCost
from support.watch import World, run
from support.worlds import halved

UNIT = World("fcfs", cost=UnitCost())


def times(events: list[Event], kind: type) -> list[tuple[float, int]]:
    return [(event.now, event.request.id) for event in events if isinstance(event, kind)]  # type: ignore[union-attr]


def test_no_requests_take_no_time() -> None:
    assert run(UNIT, []).end == 0.0


def test_steps_take_the_time_of_the_cost_model() -> None:
    done = run(UNIT, [make(0, 5, 3)])
    assert times(done.events, Token) == [(5.0, 0), (6.0, 0), (7.0, 0)]
    assert done.end == 7.0


def test_the_clock_jumps_to_the_next_arrival() -> None:
    done = run(UNIT, [make(0, 2, 1, arrival=100.0), make(1, 2, 1, arrival=200.0)])
    assert times(done.events, Finished) == [(102.0, 0), (202.0, 1)]


def test_arrivals_are_sorted_by_time_and_id() -> None:
    requests = [make(2, arrival=1.0), make(0, arrival=2.0), make(1, arrival=1.0)]
    done = run(UNIT, requests)
    assert [number for _, number in times(done.events, Arrived)] == [1, 2, 0]


def test_a_request_that_arrives_during_a_step_waits_for_its_end() -> None:
    done = run(UNIT, [make(0, 5, 2), make(1, 3, 1, arrival=1.0)])
    assert times(done.events, Arrived) == [(0.0, 0), (1.0, 1)]
    # One decode and three prefill tokens share the second step.
    assert times(done.events, Token) == [(5.0, 0), (9.0, 0), (9.0, 1)]


def test_an_arrival_at_the_end_of_a_step_joins_the_next() -> None:
    done = run(UNIT, [make(0, 5, 2), make(1, 3, 1, arrival=5.0)])
    assert [(now, [piece[0] for piece in plan[1]]) for now, plan in done.trace] == [(0.0, [0]), (5.0, [0, 1])]


def test_a_deadline_wakes_the_clock() -> None:
    world = replace(UNIT, max_seqs=1)
    done = run(world, [make(0, 50, 1), make(1, 5, 1, deadline=20.0)])
    assert times(done.events, Finished) == [(20.0, 1), (50.0, 0)]
    assert done.requests[1].progress.finish_reason is FinishReason.DEADLINE


def test_two_plans_in_flight_run_back_to_back() -> None:
    world = replace(UNIT, depth=2, overlap=True)
    done = run(world, [make(0, 4, 3)])
    assert [now for now, _ in done.trace] == [0.0, 0.0, 4.0]
    assert times(done.events, Token) == [(4.0, 0), (5.0, 0), (6.0, 0)]


def test_events_are_reported_after_each_step() -> None:
    names: list[list[str]] = []
    replica = Replica(UNIT.core(), SimulatedExecutor(UNIT.cost))
    simulate(replica, [make(0, 2, 2)], on_events=lambda events: names.append([type(e).__name__ for e in events]))
    assert names == [
        ["Arrived", "Admitted", "Reserved", "Started", "Planned"],
        ["Computed", "Token", "Planned"],
        ["Computed", "Token", "Finished"],
    ]


def test_scheduling_may_take_time() -> None:
    events: list[Event] = []
    replica = Replica(UNIT.core(), SimulatedExecutor(UNIT.cost), decision_s=0.5)
    end = simulate(replica, [make(0, 2, 3)], on_events=events.extend)
    assert times(events, Token) == [(2.5, 0), (4.0, 0), (5.5, 0)]
    assert end == 5.5


def test_a_run_can_end_early() -> None:
    events: list[Event] = []
    replica = Replica(UNIT.core(), SimulatedExecutor(UNIT.cost))
    end = simulate(replica, [make(0, 2, 9), make(1, 2, 2, arrival=7.0)], on_events=events.extend, until=4.5)
    assert end == 4.5
    assert times(events, Token) == [(2.0, 0), (3.0, 0), (4.0, 0)]
    assert list(replica.core.requests) == [0]


class Refusing:
    def open(self, context: StepContext) -> Refusing:
        return self

    def offer(self, request: Request, pending: int) -> Refusal:
        return HELD

    def take(self, request: Request, tokens: int) -> None:
        raise AssertionError


def test_a_scheduler_that_never_runs_requests_raises() -> None:
    core = UNIT.core()
    core.scheduler.policies = replace(core.scheduler.policies, batcher=Refusing())
    with pytest.raises(AssertionError, match="idle"):
        run(UNIT, load(0, 3), core=core)
    plain = UNIT.core()
    plain.scheduler.policies = replace(plain.scheduler.policies, batcher=Refusing())
    plain.start_step = plain.scheduler.schedule  # type: ignore[method-assign]
    with pytest.raises(StalledError, match="3 requests are left"):
        simulate(Replica(plain, SimulatedExecutor(UNIT.cost)), load(0, 3))


def test_only_blocking_moves_lengthen_a_step() -> None:
    cost = LinearCost(floor=1.0, prefill_token=0.0, block=0.4, transfer_floor=0.1)
    request, other = make(0), make(1)
    work = (Slice(request, 0, 8, True, False, (0, 1)),)
    two, five = (Move(Direction.OUT, other, tuple(range(blocks)), tuple(range(blocks)), blocks) for blocks in (2, 5))

    def seconds(plan: StepPlan) -> float:
        return SimulatedExecutor(cost).submit(plan, 0.0).result().seconds

    assert seconds(StepPlan(0, work)) == 1.0
    assert seconds(StepPlan(0, work, blocking=(two,))) == pytest.approx(1.9)
    assert seconds(StepPlan(0, work, overlapped=(two,))) == 1.0
    assert seconds(StepPlan(0, work, overlapped=(five,))) == 1.0
    assert seconds(StepPlan(0, (), overlapped=(two,))) == 0.0
    assert seconds(StepPlan(0, (), blocking=(two,))) == pytest.approx(0.9)


def test_the_executor_samples_for_slices_that_sample() -> None:
    request = make(0, 10)
    plan = StepPlan(0, (Slice(request, 0, 4, False, False, (0,)), Slice(request, 4, 6, True, False, (0, 1, 2))))
    handle = SimulatedExecutor(UnitCost(), lambda one, position: 100 + position).submit(plan, 3.0)
    assert handle.done()
    assert handle.result().tokens == (None, 110)
    assert handle.ready_at == 13.0


WORLD = World("fastserve")
Events = list[tuple[int, Event]]


def cluster(requests: list[Request], dispatch: Dispatch, replicas: int) -> tuple[Events, float]:
    events: Events = []
    cores = [WORLD.core() for _ in range(replicas)]
    end = simulate_cluster(
        [Replica(core, SimulatedExecutor(WORLD.cost)) for core in cores],
        requests,
        dispatch,
        on_events=lambda index, new: events.extend((index, event) for event in new),
    )
    for core in cores:
        core.assert_all_free()
    return events, end


def replicas_of(events: Events) -> dict[int, int]:
    return {event.request.id: index for index, event in events if isinstance(event, Arrived)}


@pytest.mark.parametrize("rule", halved(DISPATCH_RULES))
def test_every_request_finishes_on_its_replica(rule: str) -> None:
    events, end = cluster(load(1, 60), make_dispatch(rule, 3, WORLD.cost, longest_output), 3)
    finished = {event.request.id: index for index, event in events if isinstance(event, Finished)}
    assert finished == replicas_of(events)
    assert len(finished) == 60
    assert end == max(event.now for _, event in events)
    assert [event.now for _, event in events] == sorted(event.now for _, event in events)


@pytest.mark.parametrize("rule", halved(DISPATCH_RULES, 1))
def test_each_replica_runs_as_it_would_alone(rule: str) -> None:
    events, _ = cluster(load(2, 40), make_dispatch(rule, 2, WORLD.cost, longest_output), 2)
    replica_of = replicas_of(events)
    for replica in (0, 1):
        own = [request for request in load(2, 40) if replica_of[request.id] == replica]
        alone: list[Event] = []
        simulate(Replica(WORLD.core(), SimulatedExecutor(WORLD.cost)), own, on_events=alone.extend)

        def times(events: list[Event]) -> list[tuple[str, float]]:
            return [(type(event).__name__, event.now) for event in events]

        assert times(alone) == times([event for index, event in events if index == replica])


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="least-work"):
        make_dispatch("random", 2, WORLD.cost, longest_output)
