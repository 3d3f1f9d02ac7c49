"""State that is no KV block, through the ledger and the planner: a model with two slots for it."""

from __future__ import annotations

import pytest

from skipjoin.core.events import Preemption
from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.waits import WaitReason
from support.load import make
from support.policies import SwapAll
from support.watch import Scene

STATES = ("recurrent state", 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_requests_hold_blocks_than_there_are_slots(depth: int) -> None:
    scene = Scene({number: number for number in range(6)}, blocks=100, states=STATES, depth=depth)
    scene.add(*(make(number, 9, 5) for number in range(6)))
    scene.step()
    assert {scene.kv.states.slot_of(request) for request in scene.kv.holders()} == {0, 1}
    waits = {request.id: wait.reason for request, wait in scene.core.scheduler.waits.items()}
    assert waits[2] is WaitReason.NO_KV
    while scene.core.requests:
        scene.step()
        scene.kv.check()
        assert len(scene.kv.holders()) <= 2
    assert [len(scene.tokens[number]) for number in range(6)] == [5] * 6
    assert scene.preempted() == []


@pytest.mark.parametrize("depth", [1, 2])
def test_a_more_important_request_takes_the_slot_of_the_least_important_one(depth: int) -> None:
    scene = Scene({0: 5, 1: 4, 2: 0}, blocks=100, cpu=100, states=STATES, depth=depth, eviction=SwapAll())
    scene.add(make(0, 9, 12), make(1, 9, 12))
    scene.step()
    scene.step()
    scene.add(make(2, 9, 3))
    scene.drain()
    assert scene.preempted()[0] == (0, Preemption.DROP), "state is not swapped, so KV is dropped with it"
    assert [len(scene.tokens[number]) for number in range(3)] == [12, 12, 3]
    assert scene.kv.states.free == 2


def test_a_swapped_out_request_keeps_its_slot_and_all_of_its_kv() -> None:
    kv = KVLedger(10, 10, 4, states=STATES)
    request = make(0, 8, 4)
    kv.grow(request, 8)
    request.progress.begin(8, True, 0)
    request.progress.settle(8, True)
    assert kv.filled_after(request, 1) == 0, "a part of the KV is of no use without the state of its last token"
    kv.tiers.complete(kv.tiers.move_out(request, blocking=True))
    assert kv.states.slot_of(request) == 0
    kv.check()
    kv.release(request)
    assert kv.states.free == 2
    kv.check()


def test_check_finds_a_slot_that_leaked_or_has_no_holder() -> None:
    kv = KVLedger(10, 0, 4, states=STATES)
    kv.grow(make(0, 8), 8)
    kv.states._empty.append(0)
    with pytest.raises(LedgerError, match="a slot for recurrent state leaked or doubled"):
        kv.check()
    kv = KVLedger(10, 0, 4, states=STATES)
    kv.states.reserve(make(1))
    with pytest.raises(LedgerError, match="belong to other requests"):
        kv.check()
    kv.states.reserve(make(2))
    with pytest.raises(LedgerError, match="none is free"):
        kv.grow(make(3, 8), 8)
