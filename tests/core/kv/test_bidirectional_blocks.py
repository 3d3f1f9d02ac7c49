from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from random import Random

import pytest

from core_fuzz.device import Device
from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction, Move, Slice, Span, StepPlan, StepResult
from support.load import make

SIZE = 4
DEVICE, CPU, MACHINE_SIZE = 14, 12, 6
REQUESTS, OWNERS = 5, 3


def request_of(number: int, *, reverse: bool, tokens: int = 60, prefix: ContentPrefix | None = None) -> Request:
    request = make(number, tokens, best_effort=reverse, prefix=prefix)
    request.progress.reverse = reverse
    return request


class SharingMachine:
    """Requests of both directions that grow, share, overwrite and swap in any order.

    Moves complete or fail in `finish`; a model of the device knows what each slot holds.
    """

    def __init__(self) -> None:
        self.kv = KVLedger(DEVICE, CPU, MACHINE_SIZE)
        self.device = Device(self.kv, is_exact=True, voids=True)
        self.numbers, self.plans = count(), count()
        self.requests = [self.new(number) for number in range(REQUESTS)]
        self.transit: list[Move] = []

    def new(self, index: int) -> Request:
        """Return a request; the first ones fill blocks in reverse, and every second one has prefix-cache keys."""
        prefix = ContentPrefix(MACHINE_SIZE) if index % 2 else None
        return request_of(next(self.numbers), reverse=index < OWNERS, prefix=prefix)

    def run(self, index: int, more: int) -> None:
        """Run a request as the planner does: swap it in, take slots, compute and offer its blocks to the cache."""
        kv, request = self.kv, self.requests[index]
        held = kv.blocks_of(request)
        tokens = min(request.progress.computed + more, request.progress.known)
        if tokens == request.progress.computed or kv.shortfall(request, tokens) or (held and not held.is_settled):
            return
        if held is not None and tokens > held.room:
            self.go(kv.tiers.restore(request, tokens) if held.swapped_out else kv.sharing.take_back(request, tokens))
        held = kv.grow(request, tokens)
        self.go(kv.sharing.take_slots(request, tokens))
        assert held.room >= tokens or held.moving
        piece = Slice(
            request,
            request.progress.computed,
            tokens - request.progress.computed,
            False,
            False,
            kv.blocks_of(request).table,
        )
        self.follow(StepPlan(next(self.plans), (piece,)))
        request.progress.computed = request.progress.planned = tokens
        kv.cache.offer(request)

    def go(self, moves: list[Move]) -> None:
        self.follow(StepPlan(next(self.plans), (), blocking=tuple(moves)))
        self.transit += moves

    def follow(self, plan: StepPlan) -> None:
        self.device.follow(StepResult(plan, [None] * len(plan.slices), 0.0))
        assert not self.device.tainted

    def share(self, owns: int, borrows: int, keep: int) -> None:
        kv, owner, borrower = self.kv, self.requests[owns], self.requests[borrows]
        if not kv.sharing.can_share(owner, borrower):
            return
        kv.trim(owner)
        before, alone = kv.device_free, kv.footprint(owner)
        has = len(kv.blocks_of(borrower).table) if kv.blocks_of(borrower) else 0
        shared = kv.sharing.share(owner, keep, borrower)
        assert kv.device_free == before
        got = (len(kv.blocks_of(borrower).table) if kv.blocks_of(borrower) else 0) - has
        assert shared or not got
        assert kv.footprint(owner) == alone - got
        assert not set(kv.sharing.in_the_way(borrower, 0))

    def move_out(self, index: int, keep: int) -> None:
        request = self.requests[index]
        if self.kv.tiers.can_move_out(request, keep=keep):
            move = self.kv.tiers.move_out(request, blocking=True, keep=keep)
            self.go([move] if move is not None else [])

    def drop(self, index: int, keep: int) -> None:
        request = self.requests[index]
        kv, held = self.kv, self.kv.blocks_of(request)
        if held is not None and held.moving is None:
            kept = kv.tokens_in(request, keep := min(keep, request.progress.computed // MACHINE_SIZE, len(held.device)))
            kv.drop(request, keep=keep)
            request.progress.computed = request.progress.planned = kept

    def end(self, index: int) -> None:
        request, self.requests[index] = self.requests[index], self.new(index)
        if (held := self.kv.blocks_of(request)) is not None and held.moving is not None:
            self.finish(len(self.transit))
        request.progress.finish_reason = FinishReason.ABORT
        self.kv.cache.forget_prefix(request)
        self.kv.release(request)

    def finish(self, some: int, *, fails: bool = False) -> None:
        ended, self.transit = self.transit[:some], self.transit[some:]
        lost: dict[Request, int] = {}
        if fails:
            self.device.lose(ended)
        for move in ended:
            keep = (self.kv.tiers.fail if fails else self.kv.tiers.complete)(move)
            if keep is not None:
                lost[move.request] = min(keep, lost.get(move.request, keep))
        for request, keep in lost.items():
            kept = self.kv.tokens_in(request, keep)
            self.kv.drop(request, keep=keep)
            request.progress.computed = request.progress.planned = kept

    def check(self) -> None:
        self.kv.check()
        assert self.kv.is_moving == bool(self.transit)

    def finish_all(self) -> None:
        self.finish(len(self.transit))
        for request in list(self.kv.holders()):
            request.progress.finish_reason = FinishReason.ABORT
            self.kv.release(request)
        self.kv.check()
        assert (self.kv.device_free, self.kv.tiers.cpu_free, self.kv.available) == (DEVICE, CPU, DEVICE)
        assert not self.kv.sharing.bidirectional_blocks


def test_no_request_reads_kv_of_another_one() -> None:
    seen = Counter[tuple[Direction, bool]]()
    for seed in range(15):
        disturb(seed, seen)
    assert min(seen[direction, True] for direction in Direction) > 5


def disturb(seed: int, seen: Counter[tuple[Direction, bool]]) -> None:
    draw, machine = Random(seed), SharingMachine()
    indices = range(REQUESTS)
    for _ in range(600):
        match draw.choices(("run", "share", "move_out", "drop", "end", "finish"), (12, 8, 1, 0.3, 1, 6))[0]:
            case "run":
                machine.run(draw.choice(indices), draw.randint(1, 4))
            case "share":
                machine.share(draw.randrange(OWNERS), draw.randrange(OWNERS - 1, REQUESTS), keep=draw.randint(0, 2))
            case "move_out":
                machine.move_out(draw.choice(indices), draw.randint(0, 4))
            case "drop":
                machine.drop(draw.choice(indices), draw.randint(0, 4))
            case "end":
                machine.end(draw.choice(indices))
            case "finish":
                before = len(machine.transit)
                seen.update((move.direction, bool(move.spans)) for move in machine.transit)
                machine.finish(draw.randint(1, 5), fails=before > 0 and draw.random() < 0.1)
        machine.check()
    machine.finish_all()


def filled(kv: KVLedger, number: int, tokens: int, *, reverse: bool) -> Request:
    request = request_of(number, reverse=reverse)
    kv.grow(request, tokens)
    request.progress.computed = request.progress.planned = tokens
    return request


def fill(kv: KVLedger, request: Request, tokens: int) -> list[Move]:
    moves = [*kv.sharing.take_back(request, tokens)]
    kv.grow(request, tokens)
    moves += kv.sharing.take_slots(request, tokens)
    request.progress.computed = request.progress.planned = tokens
    kv.check()
    return moves


def test_a_borrower_fills_empty_slots_first_and_only_overwritten_slots_are_saved() -> None:
    kv = KVLedger(4, 4, SIZE)
    owner, borrower = filled(kv, 0, 6, reverse=True), request_of(1, reverse=False)
    assert kv.sharing.share(owner, 1, borrower)
    table = kv.blocks_of(borrower).table
    assert table == kv.blocks_of(owner).table[1:]
    assert (kv.sharing.bidirectional_blocks, kv.footprint(borrower), kv.footprint(owner)) == (1, 0, 1)
    assert fill(kv, borrower, 2) == []  # the owner's last block has two empty slots
    assert kv.blocks_of(owner).room == 6
    (move,) = fill(kv, borrower, 3)
    assert (move.direction, move.request, move.source, move.spans) == (Direction.OUT, owner, table, (Span(2, 1),))
    assert (kv.blocks_of(owner).room, kv.tiers.cpu_footprint(owner)) == (0, 1)
    (second,) = fill(kv, borrower, 4)
    assert (second.spans, second.target) == ((Span(3, 1),), move.target)
    assert kv.sharing.tokens_there(owner) == 4


def test_slots_are_restored_in_place_after_the_borrower_is_released() -> None:
    kv = KVLedger(4, 4, SIZE)
    owner, borrower = filled(kv, 0, 8, reverse=True), request_of(1, reverse=False)
    kv.sharing.share(owner, 1, borrower)
    (out,) = fill(kv, borrower, 3)
    kv.tiers.complete(out)
    kv.release(borrower)
    assert kv.shortfall(owner, 8) == 0
    (back,) = kv.tiers.restore(owner, 8)
    assert (back.direction, back.source, back.target) == (Direction.IN, out.target, out.source)
    assert back.spans == (Span(0, 3),)
    kv.tiers.complete(back)
    kv.check()
    assert (kv.tiers.cpu_free, kv.blocks_of(owner).room, kv.sharing.bidirectional_blocks) == (4, 8, 0)


def test_slots_are_restored_in_another_block_while_the_borrower_remains() -> None:
    kv = KVLedger(4, 4, SIZE)
    owner, borrower = filled(kv, 0, 8, reverse=True), request_of(1, reverse=False)
    kv.sharing.share(owner, 1, borrower)
    (out,) = fill(kv, borrower, 3)
    kv.tiers.complete(out)
    (shared,) = kv.blocks_of(borrower).table
    assert kv.shortfall(owner, 8) == 0
    assert kv._shared.extra(kv.blocks_of(owner), 8) == 1
    within, back = kv.tiers.restore(owner, 8)
    assert within[:4:2] == (Direction.WITHIN, (shared,))
    assert (within.spans, back.spans, back.target) == ((Span(3, 1),), (Span(0, 3),), within.target)
    assert kv.blocks_of(owner).table[1] == within.target[0] != shared
    for move in (within, back):
        kv.tiers.complete(move)
    kv.check()
    assert (kv.footprint(owner), kv.footprint(borrower), kv.sharing.bidirectional_blocks) == (2, 1, 0)


def test_owner_and_borrower_run_in_one_block_until_it_is_full() -> None:
    kv = KVLedger(2, 4, 8)
    owner, borrower = filled(kv, 0, 2, reverse=True), request_of(1, reverse=False)
    kv.sharing.share(owner, 0, borrower)
    assert [*fill(kv, borrower, 3), *fill(kv, owner, 4), *fill(kv, borrower, 4)] == []
    assert kv.blocks_of(owner).table == kv.blocks_of(borrower).table
    (within,) = fill(kv, owner, 5)  # the owner moves, because it ranks lower
    assert (within.direction, within.spans) == (Direction.WITHIN, (Span(4, 4),))
    assert fill(kv, borrower, 8) == []


def test_blocks_of_the_prefix_cache_are_not_shared_bidirectionally_and_such_blocks_have_no_key() -> None:
    kv = KVLedger(6, 4, SIZE)
    owner, other = (request_of(number, reverse=True, prefix=ContentPrefix(SIZE)) for number in range(2))
    borrower = request_of(2, reverse=False)
    kv.grow(owner, 8)
    owner.progress.computed = owner.progress.planned = 8
    kv.cache.offer(owner)
    assert kv.adopt(other).tokens == 8
    assert not kv.sharing.share(owner, 0, borrower)
    kv.release(other)
    assert kv.sharing.share(owner, 1, borrower)
    assert kv.hit(other).tokens == 4
    kv.cache.offer(owner)  # not while another request fills the block
    assert kv.hit(other).tokens == 4
    kv.release(borrower)
    kv.cache.offer(owner)
    assert kv.hit(other).tokens == 8


def test_sharing_needs_a_cpu_tier_block_for_each_block() -> None:
    kv = KVLedger(4, 1, SIZE)
    owner, borrower = filled(kv, 0, 8, reverse=True), request_of(1, reverse=False)
    assert not kv.sharing.share(owner, 0, borrower)
    assert kv.sharing.share(owner, 1, borrower)
    assert KVLedger(4, 0, SIZE).sharing is None
    assert KVLedger(4, 1, SIZE, is_exact=False).sharing is None


def lose_a_slot(kv: KVLedger) -> None:
    next(iter(kv._shared.of.values())).split = SIZE


def forget_a_borrower(kv: KVLedger) -> None:
    next(iter(kv._shared.of.values())).borrower.sharing.borrowed.clear()


def miscount(kv: KVLedger) -> None:
    next(iter(kv._shared.of.values())).owner.sharing.overwritten += 1


def lose_a_copy(kv: KVLedger) -> None:
    next(iter(kv._shared.of.values())).copy = None


@pytest.mark.parametrize("corrupt", [lose_a_slot, forget_a_borrower, miscount, lose_a_copy])
def test_check_finds_corrupted_shared_blocks(corrupt: Callable[[KVLedger], None]) -> None:
    kv = KVLedger(4, 4, SIZE)
    owner, borrower = filled(kv, 0, 7, reverse=True), request_of(1, reverse=False)
    kv.sharing.share(owner, 1, borrower)
    kv.check()
    corrupt(kv)
    with pytest.raises(LedgerError):
        kv.check()
