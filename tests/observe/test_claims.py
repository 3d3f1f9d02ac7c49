from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from skipjoin.core.events import Arrived, Event, Finished, Planned, Preempted, Preemption, Reserved
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.policy import Allocation, Callbacks
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import StepPlan
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.observe.record import Record, add_usage
from skipjoin.observe.usage import EngineUsage
from skipjoin.policies.eviction import Recompute
from skipjoin.sim.driver import Replica, simulate
from support.load import load, make
from support.policies import SwapAll
from support.watch import World

RESERVE = Account("prompts")


class NestedAdmission(Callbacks):
    """Reserves a few more blocks than needed from an earlier request, the reserve or the pool in turn.

    If the chosen parent has too few blocks, it reserves what is needed from the current parent.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Request] = {}

    def on_begin(self, now: float, kv: KVLedger) -> Iterable[tuple[Account, int]]:
        return [(RESERVE, 6)]

    def reserve(self, request: Request, target: int, kv: KVLedger) -> Allocation:
        blocks = kv.blocks_for(target) + 1 + request.id % 4
        earlier: list[Owner] = [one for number, one in self._holders.items() if number < request.id]
        parent = [*earlier, RESERVE, None][target % (len(earlier) + 2)]
        if kv.shortfall_of_reservation(request, blocks, parent) > 0:
            parent, blocks = None, kv.blocks_for(target)
        return Allocation(blocks, blocks, tokens=blocks * kv.block_size, parent=parent, group=target % 3 or None)

    def on_reserved(self, request: Request, allocation: Allocation, now: float) -> None:
        self._holders[request.id] = request

    def on_preempted(self, request: Request, now: float) -> None:
        self._holders.pop(request.id, None)

    on_finished = on_preempted


def usage_of(world: World) -> EngineUsage:
    return EngineUsage(device_blocks=world.device_blocks, block_size=world.block_size, block_bytes=1000)


@pytest.mark.parametrize("eviction", [Recompute, SwapAll])
def test_reservations_match_the_ledger(eviction: type[Recompute]) -> None:
    world = World("fcfs", eviction=eviction)
    core = world.core(replace(world.policies(), admission=NestedAdmission()))
    usage = usage_of(world)
    fold, kv = usage.reservations, core.kv
    seen: list[Event] = []

    def compare(events: list[Event]) -> None:
        seen.extend(events)
        usage.observe(events)
        parents = {request: kv.reservations.parent_of(request) for request in core.requests.values()}
        promised = {parent: kv.blocks_of(parent).reservation.promised for parent in parents if kv.blocks_of(parent)}  # type: ignore[union-attr]
        hosted = sum(blocks for one, blocks in promised.items() if isinstance(parents[one], Request))
        reserved = sum(blocks for one, blocks in promised.items() if parents[one] == RESERVE)
        assert (fold._hosted_blocks, fold._reserved_blocks) == (hosted, reserved)

    simulate(Replica(core, SimulatedExecutor(world.cost)), load(7, 60), on_events=compare)
    core.assert_all_free()
    claims = [event for event in seen if isinstance(event, Reserved)]
    found: dict[str, Any] = usage.kv()
    assert found["hosted_requests"] == len({claim.request for claim in claims if isinstance(claim.parent, Request)}) > 5
    assert found["vacated"] > 0
    assert found["hosted_blocks_mean"] > 0
    assert 0 < found["reserve_used_mean"] < 1
    groups: dict[tuple[float, Any], int] = {}
    for claim in claims:
        if claim.group is not None:
            groups[claim.now, claim.group] = groups.get((claim.now, claim.group), 0) + 1
    record: Record = {}
    add_usage(record, [usage, usage])
    mean = pytest.approx(sum(groups.values()) / len(groups), rel=1e-5)
    assert record["groups"] == {"mean_size": mean, "max_size": max(groups.values())}
    # No state of finished requests is kept.
    assert (fold._reservations, fold._nested, fold._once_hosted) == ({}, {}, set())


def test_means_are_over_time_and_children_inherit_a_parent() -> None:
    """A parent of 10 blocks hosts a child for 4 s, and the grandchild after the child is dropped."""
    usage = EngineUsage(device_blocks=20, block_size=4, block_bytes=1000)
    parent, child, grandchild = (make(number) for number in range(3))

    def plan(now: float) -> Planned:
        return Planned(StepPlan(0, ()), now, 0, 0)

    usage.observe(
        [
            *(Arrived(request, 0.0) for request in (parent, child, grandchild)),
            Reserved(parent, 0.0, None, 10),
            Reserved(child, 0.0, parent, 6),
            Reserved(grandchild, 0.0, child, 2),
            plan(2.0),
            Preempted(child, 2.0, Preemption.DROP),  # the grandchild moves to the parent
            plan(3.0),
            Preempted(parent, 3.0, Preemption.PAUSE),  # pausing frees no KV
            plan(4.0),
            Finished(parent, 4.0, FinishReason.STOP),  # the reservation it hosted becomes independent
            Preempted(grandchild, 4.0, Preemption.SWAP),
            Reserved(child, 4.0, RESERVE, 3),
            plan(6.0),
            Reserved(child, 6.0, None, 5, drawn=2),
            plan(8.0),
        ]
    )
    kv = usage.kv()
    assert (kv["hosted_requests"], kv["vacated"]) == (2, 1)
    assert kv["hosted_blocks_mean"] == pytest.approx((2 * 8 + 2 * 2) / 8)
    assert kv["reserve_used_mean"] == pytest.approx((2 * 3 + 2 * 2) / 8 / 20)
    usage.reservations.restarted()
    usage.observe([plan(9.0)])
    assert usage.kv()["reserve_used_mean"] == pytest.approx(10 / 9 / 20)
