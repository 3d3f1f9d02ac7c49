from __future__ import annotations

import pytest

from skipjoin.core.events import Arrived, Event, Finished
from skipjoin.core.request import Request
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.policies.dispatch import DISPATCH_RULES, Dispatch, make_dispatch
from skipjoin.policies.predictors import longest_output
from skipjoin.sim.driver import Replica, simulate, simulate_cluster
from support.load import load
from support.watch import World

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


@pytest.mark.parametrize("rule", DISPATCH_RULES)
def test_every_request_finishes_on_its_replica(rule: str) -> None:
    events, end = cluster(load(1, 60), make_dispatch(rule, 3, WORLD.cost, longest_output), 3)
    finished = {event.request.id: index for index, event in events if isinstance(event, Finished)}
    assert finished == replicas_of(events)
    assert len(finished) == 60
    assert end == max(event.now for _, event in events)
    assert [event.now for _, event in events] == sorted(event.now for _, event in events)


@pytest.mark.parametrize("rule", DISPATCH_RULES)
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
