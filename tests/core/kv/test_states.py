"""State that is no KV block, through the ledger and the planner: a model with two slots for it on each tier."""

from __future__ import annotations

import pytest

from skipjoin.core.events import Preemption
from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import Request
from skipjoin.core.step import StateSizes
from skipjoin.core.waits import WaitReason
from support.load import make
from support.policies import SwapAll
from support.watch import Scene

STATES = StateSizes("recurrent state", 2, 2, 2, 3.0)


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
@pytest.mark.parametrize(("cpu", "how"), [(100, Preemption.SWAP), (0, Preemption.DROP)])
def test_a_more_important_request_takes_the_slot_of_the_least_important_one(depth, cpu, how) -> None:
    scene = Scene({0: 5, 1: 4, 2: 0}, blocks=100, cpu=cpu, states=STATES, depth=depth, eviction=SwapAll())
    scene.add(make(0, 9, 12), make(1, 9, 12))
    scene.step()
    scene.step()
    scene.add(make(2, 9, 3))
    scene.drain()
    assert scene.preempted()[0] == (0, how)
    assert [len(scene.tokens[number]) for number in range(3)] == [12, 12, 3]
    assert (scene.kv.states.free, scene.kv.states.cpu_free) == (2, 2)


def computed(kv: KVLedger, tokens: int) -> Request:
    request = make(0, tokens, 4)
    kv.grow(request, tokens)
    request.progress.begin(tokens, True, 0)
    request.progress.settle(tokens, True)
    return request


def test_a_move_carries_the_state_whose_slot_is_free_once_it_is_copied() -> None:
    kv = KVLedger(10, 10, 4, states=STATES)
    request = computed(kv, 8)
    assert kv.filled_after(request, 1) == 0, "a part of the KV is of no use without the state of its last token"
    out = kv.tiers.move_out(request, blocking=False)
    assert (out.state[:2], out.blocks(4), kv.states.free) == ((0, 0), 5.0, 1)
    kv.tiers.complete(out)
    assert (kv.states.free, kv.states.cpu_free, kv.states.slot_of(request)) == (2, 1, None)
    back = kv.tiers.move_in(request)
    kv.check()
    assert kv.tiers.fail(back) == 0
    kv.release(request)
    assert (kv.states.free, kv.states.cpu_free) == (2, 2)
    kv.check()


def test_a_failed_copy_to_the_cpu_leaves_the_state_where_it_was() -> None:
    kv = KVLedger(10, 10, 4, states=STATES)
    request = computed(kv, 8)
    assert kv.tiers.fail(kv.tiers.move_out(request, blocking=False)) is None
    assert (kv.states.slot_of(request), kv.states.cpu_free) == (0, 2)
    kv.check()


def test_a_request_without_a_slot_on_the_cpu_is_not_swapped_out() -> None:
    kv = KVLedger(10, 10, 4, states=STATES._replace(cpu=0))
    assert not kv.tiers.can_move_out(computed(kv, 8))


def with_prompt(number: int, prompt: list[int]) -> Request:
    return Request(number, 0.0, prompt, 3, prefix=ContentPrefix(4))


def test_hits_end_at_snapshots_of_prompts_and_of_shared_prefixes() -> None:
    scene = Scene({number: number for number in range(5)}, blocks=100, states=STATES._replace(device=8, snapshots=3))
    common = list(range(100, 112))

    def starts(number: int, prompt: list[int]) -> int:
        scene.add(with_prompt(number, prompt))
        plan = scene.start()
        scene.finish()
        scene.drain()
        assert bool(plan.states.restored) == (plan.slices[0].start > 0)
        return plan.slices[0].start

    assert starts(0, [*common, 1, 2, 3, 4, 5]) == 0
    # The KV of three blocks is found, and a snapshot is only after the first prompt's four.
    assert starts(1, [*common, 6, 7]) == 0
    assert starts(2, [*common, 8, 9]) == 12, "the second request has left one where the common prefix ends"
    assert starts(3, [*common, 1, 2, 3, 4, 5, 6]) == 16
    assert scene.kv.states.snapshots.changes == 2, "no more borders were new"


def test_the_least_recently_used_snapshot_is_replaced_and_none_is_taken_of_a_dropped_slice() -> None:
    scene = Scene({number: number for number in range(5)}, blocks=100, states=STATES._replace(device=8, snapshots=1))
    first, second = list(range(9)), list(range(50, 59))
    scene.fails_slice = lambda piece: piece.request.id == 0
    for number, prompt in enumerate((first, first, second, second, first)):
        scene.add(with_prompt(number, prompt))
        plan = scene.step()
        assert plan.slices[0].start == (8 if number == 3 else 0)
        scene.drain()


def test_check_finds_a_slot_that_leaked_or_has_no_holder() -> None:
    kv = KVLedger(10, 0, 4, states=STATES)
    computed(kv, 8)
    kv.states.reserve(make(1))
    with pytest.raises(LedgerError, match="belong to other requests"):
        kv.check()
    with pytest.raises(LedgerError, match="none is free"):
        kv.grow(make(3, 8), 8)
    kv.states.release(make(1))
    kv.states.snapshots._empty.append(2)
    with pytest.raises(LedgerError, match="a snapshot of recurrent state leaked or doubled"):
        kv.states.snapshots.check("recurrent state")


def test_requests_with_a_common_prefix_wait_for_the_snapshot_of_the_first_one() -> None:
    sizes = STATES._replace(device=8, snapshots=4)
    scene = Scene({number: number for number in range(4)}, blocks=100, states=sizes)
    common = list(range(100, 112))
    scene.add(*(with_prompt(number, [*common, number, number + 1]) for number in range(3)), with_prompt(3, [7] * 9))
    first, second = scene.step(), scene.step()
    assert [piece.request.id for piece in first.slices] == [0, 3]
    assert [capture[1:2] for capture in first.states.captured] == [(12,), (8,)]
    assert [(piece.request.id, piece.start) for piece in second.slices[:3]] == [(0, 14), (1, 12), (2, 12)]
    assert len(second.states.restored) == 2
    scene.drain()
    assert not scene.kv.states.snapshots._shared
