from __future__ import annotations

import itertools

import pytest

from core.kv.test_prefixes import BLOCK, cached, request_for
from skipjoin.core.events import Admitted, Moved
from skipjoin.core.kv.block_pool import BlockPool
from skipjoin.core.kv.cpu_cache import CpuCache
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import EvictionPolicy
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Recompute
from support.load import make
from support.watch import Scene, Stepper

DEVICE = 12


class Overlapped(Recompute):
    def returns_overlapped(self, request: Request) -> bool:
        return True


def stepper(
    *,
    device: int = DEVICE,
    cpu: int = 40,
    is_exact: bool = True,
    eviction: EvictionPolicy | None = None,
    depth: int = 1,
) -> Stepper:
    ranks, batcher = dict.fromkeys(range(100), 0), Greedy(8, 64, chunked=True)
    return Scene(ranks, blocks=device, cpu=cpu, is_exact=is_exact, batcher=batcher, eviction=eviction, depth=depth)


def text(number: int) -> range:
    return range(1000 * number, 1000 * number + 7 * BLOCK + 1)


def on_cpu(steps: Stepper) -> list[int]:
    return [event.on_cpu for event in steps.events if isinstance(event, Admitted)]


def computed(kv: KVLedger, number: int, of: int) -> Request:
    request = request_for(number, text(of))
    kv.grow(request, 28)
    request.progress.computed = request.progress.planned = 28
    kv.cache.offer(request)
    return request


def serve(steps: Stepper, *texts: int) -> None:
    """Serve one request after the other, each of which fills more than half of the device."""
    for number in texts:
        steps.add(request_for(len(steps.tokens), text(number), 8))
        steps.drain()


@pytest.mark.parametrize("late", [0, 3])
def test_kv_that_the_device_evicts_is_found_on_the_cpu_tier(late: int) -> None:
    steps = stepper()
    steps.late = late
    serve(steps, 1, 2, 3, 1)
    assert [tokens > 0 for tokens in cached(steps)] == [False, False, False, True]
    assert on_cpu(steps)[-1] > 0
    assert steps.tokens[3] == steps.tokens[0]


@pytest.mark.parametrize("without", [{"cpu": 0}, {"is_exact": False}])
def test_nothing_is_copied_without_exact_cpu_blocks(without: dict[str, int]) -> None:
    steps = stepper(**without)
    serve(steps, 1, 2, 3, 1)
    assert on_cpu(steps) == [0, 0, 0, 0]
    assert not any(isinstance(event, Moved) for event in steps.events)


def test_failed_copies_are_not_found() -> None:
    steps = stepper()
    steps.fails = lambda move: move.direction is Direction.OUT
    serve(steps, 1, 2, 3, 1)
    assert on_cpu(steps) == [0, 0, 0, 0]


def test_kv_is_recomputed_when_its_move_in_fails() -> None:
    steps = stepper()
    serve(steps, 1, 2, 3)
    steps.fails = lambda move: move.direction is Direction.IN
    serve(steps, 1)
    assert on_cpu(steps)[3] > 0
    assert steps.tokens[3] == steps.tokens[0]


def test_kv_is_swapped_in_while_others_run() -> None:
    steps = stepper(eviction=Overlapped())
    serve(steps, 1, 2, 3)
    steps.add(make(50, 4, 12))
    steps.step()
    steps.add(request_for(51, text(1), 3))
    plan = steps.step()
    assert [piece.request.id for piece in plan.slices] == [50]
    assert [move.request.id for move in plan.overlapped if move.request is not None] == [51]
    plan = steps.step()
    assert [piece.request.id for piece in plan.slices] == [50, 51]
    steps.drain()
    assert len(steps.tokens[51]) == 3


def test_swapped_kv_is_found_after_its_request_is_released() -> None:
    kv = KVLedger(DEVICE, 8, BLOCK)
    first = computed(kv, 0, 1)
    move = kv.tiers.move_out(first, blocking=False)
    assert move is not None
    kv.tiers.complete(move)
    first.progress.finish_reason = FinishReason.ABORT
    kv.release(first)
    kv.grow(make(1, 4), DEVICE * BLOCK)  # takes all blocks of the device
    assert kv.hit(request_for(2, text(1)))[::3] == (28, 7)
    assert (kv.tiers.cpu_free, kv.cache.cached_cpu_blocks) == (8, 7)
    kv.check()


def test_a_copy_is_not_found_if_its_source_block_was_reused_meanwhile() -> None:
    kv = KVLedger(DEVICE, 40, BLOCK)
    first = computed(kv, 0, 1)
    first.progress.finish_reason = FinishReason.STOP
    kv.release(first)
    kv.grow(make(1, 4), BLOCK)
    move = kv.tiers.keep_cached(1)
    assert kv.tiers.keep_cached(1) is None  # one copy at a time
    assert len(move.source) == 2
    kv.grow(make(2, 4), 5 * BLOCK)  # the four empty blocks and the last cached one
    kv.tiers.complete(move)
    kv.check()
    assert (kv.cache.cached_blocks, kv.cache.cached_cpu_blocks) == (6, 1)
    assert kv.hit(request_for(3, text(1))) == (24, 0, None, 0)


@pytest.mark.parametrize("depth", [1, 2, 6])
@pytest.mark.parametrize(("late", "sizes"), [(0, [8, 16]), (2, [8, 16]), (4, [8, 4])])
def test_copies_that_complete_quickly_are_followed_by_larger_ones(depth: int, late: int, sizes: list[int]) -> None:
    steps = stepper(device=200, cpu=600, depth=depth)
    steps.late = late
    for number in range(2):
        steps.add(request_for(number, range(1000 * number, 1000 * number + 150 * BLOCK), 2))
        steps.drain()
    moves = [event.move for event in steps.events if isinstance(event, Moved) and event.move.request is None]
    assert [len(move.source) for move in moves[:2]] == sizes


@pytest.mark.parametrize("per_step", [16, 130])
@pytest.mark.parametrize("steps_of_copy", [1, 2])
def test_copies_keep_up_with_what_steps_reuse(per_step: int, steps_of_copy: int) -> None:
    """A step of a large prompt reuses more blocks than a copy has at first."""
    device, cpu = BlockPool(16 * per_step), BlockPool(1 << 15)
    copies, names = CpuCache(device, cpu, BLOCK, is_exact=True), itertools.count()
    kept: list[bool] = []
    left = 0
    for step in range(120):
        reused = (
            [key for _, key in itertools.islice(device.next_cached(per_step), per_step)] if not device.empty else []
        )
        taken = device.take(per_step)
        for block in taken:
            device.name(block, next(names))
        if step >= 80:
            kept += [cpu.find(key) is not None for key in reused]
        move = copies.begin(1)
        device.put(taken)
        left = steps_of_copy if move is not None else left - 1
        if copies.targets and left == 1:
            copies.end(is_complete=True)
    assert len(kept) == 40 * per_step
    assert sum(kept) >= 0.95 * len(kept)


def test_requests_take_cpu_blocks_from_the_cache() -> None:
    kv = KVLedger(DEVICE, 7, BLOCK)
    for number in range(2):
        request = computed(kv, number, number)
        move = kv.tiers.move_out(request, blocking=True)
        assert move is not None
        kv.tiers.complete(move)
        assert kv.hit(request_for(5, text(number))).swapped_out == 0  # the request holds them
        if number == 0:
            kv.release(request)
            assert kv.cache.cached_cpu_blocks == 7
    assert (kv.tiers.cpu_free, kv.cache.cached_cpu_blocks) == (0, 0)
    kv.check()


def test_a_recalled_move_leaves_no_cached_cpu_blocks() -> None:
    kv = KVLedger(DEVICE, 40, BLOCK)
    request = computed(kv, 0, 1)
    move = kv.tiers.move_out(request, blocking=True, keep=3)
    assert move is not None
    kv.tiers.recall(move)
    kv.drop(request)
    assert (kv.tiers.cpu_free, kv.cache.cached_cpu_blocks) == (40, 0)
    kv.check()
