"""What is lent to which request, folded from events, against the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from skipjoin.core.events import Arrived, Claimed, Event, Finished, Planned, Preempted, Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.policy import Callbacks, Grant
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


class Lending(Callbacks):
    """Claims a few blocks more than are needed now, of anything that may lend them: an earlier request, the reserve or
    the pool; what is needed, of the present lender, if that has too few."""

    def __init__(self) -> None:
        self._claimants: dict[int, Request] = {}

    def begin(self, now: float, kv: KVLedger) -> Iterable[tuple[Account, int]]:
        return [(RESERVE, 6)]

    def claim(self, request: Request, target: int, kv: KVLedger) -> Grant:
        blocks = kv.blocks_for(target) + 1 + request.id % 4
        earlier: list[Owner] = [one for number, one in self._claimants.items() if number < request.id]
        lender = [*earlier, RESERVE, None][target % (len(earlier) + 2)]
        if kv.shortfall_of_reservation(request, blocks, lender) > 0:
            lender, blocks = None, kv.blocks_for(target)
        return Grant(blocks, blocks, tokens=blocks * kv.block_size, lender=lender, group=target % 3 or None)

    def claimed(self, request: Request, now: float) -> None:
        self._claimants[request.id] = request

    def evicted(self, request: Request, now: float) -> None:
        self._claimants.pop(request.id, None)

    finished = evicted


def usage_of(world: World) -> EngineUsage:
    return EngineUsage(device_blocks=world.device_blocks, block_size=world.block_size, block_bytes=1000)


@pytest.mark.parametrize("eviction", [Recompute, SwapAll])
def test_claims_are_those_of_the_ledger(eviction: type[Recompute]) -> None:
    world = World("fcfs", eviction=eviction)
    core = world.core(replace(world.policies(), admission=Lending()))
    usage = usage_of(world)
    fold, kv = usage.claims, core.kv
    seen: list[Event] = []

    def look(events: list[Event]) -> None:
        seen.extend(events)
        usage.observe(events)
        lenders = {one: kv.reservations.parent_of(one) for one in core.requests.values()}
        promised = {one: kv.blocks_of(one).reservation.promised for one in lenders if kv.blocks_of(one)}  # type: ignore[union-attr]
        hosted = sum(blocks for one, blocks in promised.items() if isinstance(lenders[one], Request))
        reserved = sum(blocks for one, blocks in promised.items() if lenders[one] == RESERVE)
        assert (fold._hosted_blocks, fold._reserved_blocks) == (hosted, reserved)

    simulate(Replica(core, SimulatedExecutor(world.cost)), load(7, 60), on_events=look)
    core.assert_all_free()
    claims = [event for event in seen if isinstance(event, Claimed)]
    found: dict[str, Any] = usage.kv()
    assert found["hosted_requests"] == len({one.request for one in claims if isinstance(one.lender, Request)}) > 5
    assert found["vacated"] > 0
    assert found["hosted_blocks_mean"] > 0
    assert 0 < found["reserve_used_mean"] < 1
    groups: dict[tuple[float, Any], int] = {}
    for one in claims:
        if one.group is not None:
            groups[one.now, one.group] = groups.get((one.now, one.group), 0) + 1
    record: Record = {}
    add_usage(record, [usage, usage])
    mean = pytest.approx(sum(groups.values()) / len(groups), rel=1e-5)
    assert record["groups"] == {"mean_size": mean, "max_size": max(groups.values())}
    # Nothing of those that are gone is kept.
    assert (fold._claims, fold._guests, fold._once_hosted) == ({}, {}, set())


def test_means_are_over_time_and_guests_inherit_a_lender() -> None:
    """A host of 10 blocks is lent to for 4 s; the second guest nests in the first one, and is handed on."""
    usage = EngineUsage(device_blocks=20, block_size=4, block_bytes=1000)
    host, guest, nested = (make(number) for number in range(3))

    def plan(now: float) -> Planned:
        return Planned(StepPlan(0, ()), now, 0, 0)

    usage.observe(
        [
            *(Arrived(one, 0.0) for one in (host, guest, nested)),
            Claimed(host, 0.0, None, 10),
            Claimed(guest, 0.0, host, 6),
            Claimed(nested, 0.0, guest, 2),
            plan(2.0),
            Preempted(guest, 2.0, Preemption.DROP),  # the host lends to the nested one
            plan(3.0),
            Preempted(host, 3.0, Preemption.PAUSE),  # takes no KV
            plan(4.0),
            Finished(host, 4.0, FinishReason.STOP),  # it is lent to no more
            Preempted(nested, 4.0, Preemption.SWAP),
            Claimed(guest, 4.0, RESERVE, 3),
            plan(6.0),
            Claimed(guest, 6.0, None, 5, drawn=2),
            plan(8.0),
        ]
    )
    kv = usage.kv()
    assert (kv["hosted_requests"], kv["vacated"]) == (2, 1)
    assert kv["hosted_blocks_mean"] == pytest.approx((2 * 8 + 2 * 2) / 8)
    assert kv["reserve_used_mean"] == pytest.approx((2 * 3 + 2 * 2) / 8 / 20)
    usage.claims.restarted()
    usage.observe([plan(9.0)])
    assert usage.kv()["reserve_used_mean"] == pytest.approx(10 / 9 / 20)
