from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from skipjoin.core.kv.ledger import KVLedger, LedgerError
from skipjoin.core.kv.request_blocks import RequestBlocks
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.prefixes import NamedPrefix
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction, Move
from support.load import make
from support.watch import nested_in

DEVICE, CPU, BLOCK = 12, 8, 4
ACCOUNT = Account("prompts")


class LedgerMachine(RuleBasedStateMachine):
    """Random calls on a ledger for several requests; calls that it forbids must raise.

    Attributes:
        content: Content of each block of a tier, by tier and block. Full blocks are named by their text, which several
            requests may share, and others by their request.
    """

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVLedger(DEVICE, CPU, BLOCK)
        self.kv.reservations.fund(ACCOUNT, 2)
        self.transit: dict[Request, tuple[Move, bool]] = {}
        self.copied: Move | None = None
        self.content: dict[tuple[str, int], Hashable] = {}
        self.names: dict[Request, list[int]] = {}
        self.count = 0

    def on_device(self, request: Request) -> bool:
        held = self.kv.blocks_of(request)
        return held is None or (not held.cpu and request not in self.transit)

    @rule(target=requests, common=st.sampled_from([0, 2, DEVICE]), tokens=st.integers(0, 4 * BLOCK))
    def new(self, common: int, tokens: int) -> Request:
        """Add a request whose first `common` blocks others share, with `tokens` tokens computed if there is room."""
        self.count += 1
        names = [place if place < common else 100 * self.count + place for place in range(DEVICE)]
        request = make(self.count, 1000, prefix=NamedPrefix(names, BLOCK, BLOCK))
        self.names[request] = names
        self.kv.cache.await_prefix(request)
        self.adopt(request)
        if tokens and self.kv.shortfall(request, tokens) == 0:
            self.kv.grow(request, tokens)
            self.compute(request, 1.0, offers=True)
        return request

    def content_of(self, request: Request, place: int) -> Hashable:
        is_full = (place + 1) * BLOCK <= request.progress.computed
        return self.names[request][place] if is_full else (request, place)

    @rule(request=requests)
    def adopt(self, request: Request) -> None:
        kv = self.kv
        if kv.blocks_of(request) is not None:
            return
        tokens, held, _, swapped_out = kv.hit(request)
        available, free, cpu_free = kv.available, kv.device_free, kv.tiers.cpu_free
        taken = tokens // BLOCK - held - swapped_out
        if taken > available:
            return
        assert kv.adopt(request).tokens == tokens < request.progress.known
        request.progress.computed = request.progress.planned = tokens
        assert (kv.available, kv.device_free, kv.tiers.cpu_free) == (
            available - taken,
            free - taken,
            cpu_free - swapped_out,
        )
        assert (kv.blocks_of(request) is None) == (tokens == 0)

    @rule(
        request=requests,
        blocks=st.integers(0, DEVICE),
        tokens=st.none() | st.integers(0, DEVICE * BLOCK),
        parent=st.none() | st.just(ACCOUNT) | requests,
    )
    def reserve(self, request: Request, blocks: int, tokens: int | None, parent: Owner) -> None:
        kv = self.kv
        if not self.on_device(request):
            return
        if not (parent in (None, ACCOUNT) or (isinstance(parent, Request) and kv.blocks_of(parent))):
            with pytest.raises(LedgerError, match="and has no reservation"):
                kv.reserve(request, blocks, parent=parent)
        elif request in self.ancestors(parent):
            with pytest.raises(LedgerError, match="of its own reservation"):
                kv.reserve(request, blocks, parent=parent)
        elif kv.shortfall_of_reservation(request, blocks, parent) <= 0:
            available = kv.available
            kv.reserve(request, blocks, tokens=tokens, parent=parent)
            assert kv.available >= min(0, available)
            assert kv.reservations.parent_of(request) == parent
            assert parent is None or request in nested_in(kv, parent)
            held = kv.blocks_of(request)
            assert held.room == min(len(held.device) * BLOCK, request.progress.reserved_tokens)

    def ancestors(self, parent: Owner) -> set[Request]:
        found: set[Request] = set()
        one: Owner = parent
        while isinstance(one, Request):
            found.add(one)
            one = self.kv.reservations.parent_of(one)
        return found

    @rule(blocks=st.integers(0, DEVICE))
    def fund(self, blocks: int) -> None:
        available = self.kv.available
        self.kv.reservations.fund(ACCOUNT, blocks)
        assert self.kv.available >= min(0, available)
        if blocks <= available:
            assert self.kv.reservations.unused(ACCOUNT) <= blocks

    @rule(share=st.floats(0, 1))
    def draw(self, share: float) -> None:
        blocks, available = int(share * self.kv.reservations.unused(ACCOUNT)), self.kv.available
        self.kv.reservations.draw(ACCOUNT, blocks)
        assert self.kv.available == available + blocks

    @rule(request=requests, tokens=st.integers(1, DEVICE * BLOCK))
    def grow(self, request: Request, tokens: int) -> None:
        if not self.on_device(request):
            if request not in self.transit or self.transit[request][0].direction is Direction.OUT:
                with pytest.raises(LedgerError, match="grows while"):
                    self.kv.grow(request, tokens)
            return
        available = self.kv.available
        if self.kv.shortfall(request, tokens) == 0:
            held = self.kv.grow(request, tokens)
            assert len(held.device) * BLOCK >= tokens
            assert self.kv.blocks_of(request).table == tuple(held.device)
            # A request that keeps to the shortfall takes no blocks that are promised to others.
            assert self.kv.available >= min(0, available)
        elif self.kv.blocks_for(tokens) > DEVICE:
            with pytest.raises(LedgerError, match="are free"):
                self.kv.grow(request, tokens)

    @rule(request=requests, tokens=st.integers(1, DEVICE * BLOCK))
    def try_grow(self, request: Request, tokens: int) -> None:
        if (held := self.kv.blocks_of(request)) is None:
            return
        before, short = (held.table, self.kv.available), self.kv.shortfall(request, tokens)
        if self.kv.try_grow(request, tokens):
            assert not short
            assert held.room >= tokens
        else:
            assert (held.table, self.kv.available) == before

    @rule(request=requests, share=st.floats(0, 1), offers=st.booleans())
    def compute(self, request: Request, share: float, offers: bool) -> None:
        held = self.kv.blocks_of(request)
        if held is not None and self.on_device(request):
            begun = request.progress.computed // BLOCK
            request.progress.computed = request.progress.planned = max(
                request.progress.computed, int(share * held.room)
            )
            others = {
                block for holder in self.kv.holders() if holder is not request for block in self.places(holder)[0]
            }
            for place in range(begun, self.kv.blocks_for(request.progress.computed)):
                if place * BLOCK < request.progress.computed > begun * BLOCK:
                    assert held.device[place] not in others, "a block is written that another request reads"
                    self.content["device", held.device[place]] = self.content_of(request, place)
            if offers:
                self.kv.cache.offer(request)
                assert held.keyed == request.progress.computed // BLOCK

    @rule(request=consumes(requests))
    def release(self, request: Request) -> None:
        if request in self.transit:
            with pytest.raises(LedgerError, match="in transit"):
                self.kv.release(request)
            self.complete(request)
        request.progress.finish_reason = FinishReason.ABORT
        self.kv.cache.forget_prefix(request)
        self.kv.release(request)
        assert self.kv.blocks_of(request) is None
        assert self.kv.footprint(request) == 0

    @rule(
        request=requests, blocking=st.booleans(), share=st.sampled_from([0.0, 0.4, 0.7, 1.0]), completes=st.booleans()
    )
    def move_out(self, request: Request, blocking: bool, share: float, completes: bool) -> None:
        if self.kv.blocks_of(request) is None:
            return
        keep = int(share * self.kv.filled(request))
        if not self.kv.tiers.can_move_out(request, keep=keep):
            with pytest.raises(LedgerError, match="cannot be moved out"):
                self.kv.tiers.move_out(request, blocking=blocking, keep=keep)
            return
        free, filled = self.kv.device_free, self.kv.filled(request)
        table, rest = self.places(request)
        stay = self.held_by_others(table[keep if blocking else filled :], request)
        move = self.kv.tiers.move_out(request, blocking=blocking, keep=keep)
        assert move.source == tuple(table[keep:filled])
        assert len(move.target) == len(move.source) == self.kv.blocks_for(move.tokens)
        assert keep * BLOCK + move.tokens == min(request.progress.computed, filled * BLOCK)
        # The source of an overlapped copy stays pinned until it completes.
        assert self.kv.device_free - free == len(table) - (keep if blocking else filled) - stay
        assert self.places(request) == (table[: keep if blocking else filled], [*move.target, *rest])
        if blocking:
            self.copy(move)
        self.transit[request] = (move, blocking)
        if completes:
            self.complete(request)

    def held_by_others(self, blocks: list[int], request: Request) -> int:
        others = {block for holder in self.kv.holders() if holder is not request for block in self.places(holder)[0]}
        return len(others.intersection(blocks))

    @rule(request=requests, freed=st.integers(0, DEVICE))
    def evict(self, request: Request, freed: int) -> None:
        """Free blocks without KV first, then the last ones with KV, as an eviction does."""
        kv, held = self.kv, self.kv.blocks_of(request)
        if held is None or request in self.transit:
            return
        footprint, filled, before = kv.footprint(request), kv.filled(request), self.places(request)
        parent = kv.reservations.parent_of(request)
        headroom = kv.reservations.headroom(parent)
        keep = kv.filled_after(request, freed)
        if keep == filled:
            kv.trim(request)
            assert self.places(request) == (before[0][:keep], before[1])
        else:
            kept = kv.tokens_in(request, keep)
            kv.drop(request, keep=keep)
            request.progress.computed = request.progress.planned = kept
            assert self.places(request) == (before[0][:keep], [])
        assert kv.footprint(request) <= max(0, footprint - freed)
        if not self.held_by_others(before[0], request):
            assert kv.footprint(request) == keep
        if parent is None:
            assert kv.available - headroom == footprint - kv.footprint(request)

    def places(self, request: Request) -> tuple[list[int], list[int]]:
        held = self.kv.blocks_of(request)
        return ([], []) if held is None else (list(held.device), list(held.cpu))

    def copy(self, move: Move) -> None:
        tiers = ("device", "cpu") if move.direction is Direction.OUT else ("cpu", "device")
        for source, target in zip(move.source, move.target, strict=True):
            self.content[tiers[1], target] = self.content[tiers[0], source]

    @rule(request=requests)
    def move_in(self, request: Request) -> None:
        if self.kv.blocks_of(request) is None:
            return
        if not self.kv.tiers.can_move_in(request):
            with pytest.raises(LedgerError, match="cannot be moved in"):
                self.kv.tiers.move_in(request)
            return
        cpu_free = self.kv.tiers.cpu_free
        move = self.kv.tiers.move_in(request)
        assert self.kv.available >= 0, "the move took blocks that are promised to other requests"
        assert self.kv.tiers.cpu_free == cpu_free, "the CPU blocks must stay pinned"
        table = self.kv.blocks_of(request).table
        assert table[-len(move.target) :] == move.target
        assert (len(table) - len(move.target)) * BLOCK + move.tokens == request.progress.computed
        self.transit[request] = (move, True)

    @rule(request=requests)
    def complete(self, request: Request) -> None:
        if request not in self.transit:
            return
        move, blocking = self.transit.pop(request)
        assert not self.kv.blocks_of(request).is_settled
        if not (blocking and move.direction is Direction.OUT):
            self.copy(move)
        device, cpu = self.places(request)
        self.kv.tiers.complete(move)
        assert self.kv.blocks_of(request).is_settled
        if move.direction is Direction.OUT:
            assert self.places(request) == (device if blocking else device[: -len(move.source)], cpu)
        else:
            assert self.places(request) == (device, [])
        with pytest.raises(LedgerError, match="not in transit"):
            self.kv.tiers.complete(move)

    @rule(request=requests)
    def fail(self, request: Request) -> None:
        if request not in self.transit:
            return
        move, blocking = self.transit.pop(request)
        device, cpu = self.places(request)
        keep = self.kv.tiers.fail(move)
        assert (keep is None) == (move.direction is Direction.OUT and not blocking)
        assert self.kv.blocks_of(request).is_settled
        with pytest.raises(LedgerError, match="not in transit"):
            self.kv.tiers.fail(move)
        if keep is None:
            assert self.places(request) == (device, cpu[len(move.target) :])
        else:
            self.kv.drop(request, keep=keep)
            request.progress.computed = request.progress.planned = keep * BLOCK
            assert self.places(request) == (device[:keep], [])
            assert not set(device[:keep]).intersection(move.source, move.target)

    @rule()
    def keep_cached(self) -> None:
        move = self.kv.tiers.keep_cached(1)
        assert move is None or self.copied is None
        self.copied = self.copied or move

    @rule(fails=st.booleans())
    def end_copy(self, fails: bool) -> None:
        if self.copied is None:
            return
        if not fails:  # the copy carries whatever the source holds by now
            self.content |= {
                ("cpu", target): self.content.get(("device", source))
                for source, target in zip(self.copied.source, self.copied.target, strict=True)
            }
        assert (self.kv.tiers.fail if fails else self.kv.tiers.complete)(self.copied) is None
        self.copied = None

    @invariant()
    def conserved(self) -> None:
        kv = self.kv
        for direction in Direction:
            blocks = sum(len(move.source) for move, _ in self.transit.values() if move.direction is direction)
            copied = len(self.copied.source) if self.copied and direction is Direction.OUT else 0
            assert kv.tiers.blocks_in_transit[direction] == blocks + copied
        assert kv.is_moving == bool(self.transit or self.copied)
        kv.check()
        held = [kv.blocks_of(request) for request in kv.holders()]
        assert kv.device_free + len({block for entry in held if entry for block in entry.device}) == DEVICE
        copied = len(self.copied.target) if self.copied else 0
        assert kv.tiers.cpu_free + sum(len(entry.cpu) for entry in held if entry) + copied == CPU
        top = sum(self.size(holder) for holder in kv.holders() if kv.reservations.parent_of(holder) is None)
        account = max(kv.reservations.find(ACCOUNT).promised, sum(map(self.size, nested_in(kv, ACCOUNT))))
        assert kv.available == DEVICE - top - account

    @invariant()
    def kv_is_where_the_ledger_finds_it(self) -> None:
        for request in self.kv.holders():
            device, cpu = self.places(request)
            if request in self.transit:
                continue
            places = [*(("device", block) for block in device), *(("cpu", block) for block in cpu)]
            filled = places[: self.kv.blocks_for(request.progress.computed)]
            assert [self.content[place] for place in filled] == [
                self.content_of(request, n) for n in range(len(filled))
            ]
        for tier, pool in (("device", self.kv.device), ("cpu", self.kv.cpu)):
            for name, block in pool._blocks.items():
                if tier == "device" or pool.find_free(name) is not None:
                    assert self.content[tier, block] == int.from_bytes(name[:8], "big", signed=True)

    def size(self, request: Request) -> int:
        held = self.kv.blocks_of(request)
        nested_blocks = sum(map(self.size, nested_in(self.kv, request)))
        return max(held.reservation.promised, len(held.device) + nested_blocks) - held.reservation.adopted

    def teardown(self) -> None:
        self.end_copy(fails=False)
        for request in list(self.transit):
            self.complete(request)
        for request in list(self.names):
            request.progress.finish_reason = FinishReason.ABORT
            self.kv.cache.forget_prefix(request)
            self.kv.release(request)
        self.kv.check()
        assert not self.kv.device._waiting
        assert not self.kv.cpu._waiting
        self.kv.reservations.fund(ACCOUNT, 0)
        assert (self.kv.device_free, self.kv.tiers.cpu_free, self.kv.available) == (DEVICE, CPU, DEVICE)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(stateful_step_count=50)


def blocks_of(kv: KVLedger, number: int, tokens: int) -> Request:
    request = make(number, tokens)
    kv.grow(request, tokens)
    request.progress.computed = request.progress.planned = tokens
    return request


def share_without_adoption(kv: KVLedger, one: RequestBlocks, other: RequestBlocks) -> None:
    kv._holders.of[one.device[0]] = [one, other]


def reserve_in_a_cycle(kv: KVLedger, one: RequestBlocks, other: RequestBlocks) -> None:
    for held, parent in ((one.reservation, other.reservation), (other.reservation, one.reservation)):
        held._part()
        held.parent = parent


def key_an_empty_block(kv: KVLedger, *_: RequestBlocks) -> None:
    block = kv.device._empty[0]
    kv.device._blocks[b"key"], kv.device._keys[block] = block, b"key"


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda kv, *_: kv.device._empty.pop(),
        lambda kv, *_: kv.cpu._empty.pop(),
        lambda kv, *_: kv.device._empty.append(kv.device._empty[-1]),
        lambda kv, *_: kv.device._empty.__setitem__(0, DEVICE + 5),
        lambda kv, *_: kv.device._cached.update({kv.device._empty.pop(): None}),
        lambda kv, *_: kv.device._blocks.update({b"key": 0}),
        lambda kv, one, other: one.device.__setitem__(0, other.device[0]),
        lambda kv, one, _: setattr(one, "table", one.table[::-1]),
        lambda kv, one, _: setattr(one, "room", one.room + BLOCK),
        lambda kv, one, _: one.cpu.extend(kv.cpu.take(1)),
        lambda kv, one, _: setattr(one.reservation, "size", one.reservation.size - 1),
        lambda kv, one, _: setattr(one.reservation, "shared", one.reservation.shared + 1),
        lambda kv, *_: setattr(kv.reservations.root, "nested_blocks", kv.reservations.root.nested_blocks - 1),
        lambda kv, *_: setattr(next(iter(kv.holders())).progress, "computed", 100),
        lambda kv, *_: kv.tiers.blocks_in_transit.update({Direction.OUT: 1}),
        lambda kv, *_: kv.held.popitem(),
        share_without_adoption,
        reserve_in_a_cycle,
        key_an_empty_block,
    ],
)
def test_check_detects_corruption(corrupt: Callable[[KVLedger, RequestBlocks, RequestBlocks], object]) -> None:
    kv = KVLedger(DEVICE, CPU, BLOCK)
    blocks_of(kv, 0, 9)
    kv.reserve(blocks_of(kv, 1, 5), 4)
    kv.check()
    corrupt(kv, *filter(None, map(kv.blocks_of, kv.holders())))
    with pytest.raises(LedgerError):
        kv.check()


def test_expected_kv_is_pinned_until_it_is_received() -> None:
    kv = KVLedger(DEVICE, CPU, BLOCK)
    request = make(0, 10)
    request.progress.computed = 10
    kv.tiers.expect(request)
    kv.check()
    assert kv.device_free == DEVICE - 3
    assert (kv.blocks_of(request).is_settled, kv.is_moving, kv.tiers.can_move_out(request)) == (False, False, False)
    for wrong in (kv.release, kv.tiers.expect):
        with pytest.raises(LedgerError, match="in transit"):
            wrong(request)
    kv.tiers.receive(request)
    with pytest.raises(LedgerError, match="does not expect"):
        kv.tiers.receive(request)
    kv.check()
    kv.release(request)
    assert kv.device_free == DEVICE


def test_blocks_are_handed_out_lowest_first_and_again_in_the_same_order() -> None:
    kv = KVLedger(DEVICE, CPU, BLOCK)
    first = blocks_of(kv, 0, 12)
    assert kv.blocks_of(first).table == (0, 1, 2)
    kv.release(first)
    assert kv.blocks_of(blocks_of(kv, 1, 12)).table == (0, 1, 2)


def test_a_reservation_takes_available_blocks_but_no_free_ones() -> None:
    kv = KVLedger(DEVICE, CPU, BLOCK)
    owner, other = make(0), make(1)
    kv.reserve(owner, 10)
    assert (kv.device_free, kv.available) == (12, 2)
    assert kv.shortfall(owner, 40) == 0
    assert kv.shortfall(other, 12) == 1
    kv.grow(owner, 20)
    assert (kv.device_free, kv.available) == (7, 2)
    kv.release(owner)
    assert (kv.device_free, kv.available) == (12, 12)


@pytest.mark.parametrize(
    ("direction", "blocking", "grows"),
    [
        (Direction.OUT, False, False),
        (Direction.OUT, True, False),
        (Direction.IN, True, False),
        (Direction.IN, True, True),
    ],
    ids=["out-during-a-step", "out", "in", "in-and-grown"],
)
def test_a_failed_move_loses_the_kv_unless_its_source_is_intact(
    direction: Direction, blocking: bool, grows: bool
) -> None:
    kv = KVLedger(DEVICE, CPU, BLOCK)
    request = blocks_of(kv, 0, 8)
    table = kv.blocks_of(request).table
    move = kv.tiers.move_out(request, blocking=blocking)
    if direction is Direction.IN:
        kv.tiers.complete(move)
        move = kv.tiers.move_in(request)
    assert (kv.tiers.blocks_in_transit[direction], sum(kv.tiers.blocks_in_transit.values())) == (2, 2)
    if grows:
        kv.grow(request, 9)
    is_kept = direction is Direction.OUT and not blocking
    assert kv.tiers.fail(move) == (None if is_kept else 0)
    assert (kv.tiers.cpu_free, kv.is_moving) == (CPU, False)
    with pytest.raises(LedgerError, match="not in transit"):
        kv.tiers.complete(move)
    if is_kept:
        assert (kv.device_free, kv.blocks_of(request).table) == (DEVICE - 2, table)
        assert kv.grow(request, 9).room == 12
    else:
        kv.release(request)
        request.progress.computed = 0
        assert kv.device_free == DEVICE
    kv.check()


def test_a_move_out_takes_computed_blocks_only_and_ends_the_reservation() -> None:
    kv = KVLedger(DEVICE, CPU, BLOCK)
    request = make(0, 40)
    kv.reserve(request, 10)
    kv.grow(request, 24)
    request.progress.computed = request.progress.planned = 5
    move = kv.tiers.move_out(request, blocking=False)
    assert (move.source, kv.device_free, kv.available) == ((0, 1), 10, 10)


def test_a_move_in_does_not_take_blocks_reserved_by_others() -> None:
    kv = KVLedger(DEVICE, CPU, BLOCK)
    request = blocks_of(kv, 0, 16)
    kv.tiers.complete(kv.tiers.move_out(request, blocking=True))
    kv.reserve(make(1), 9)
    assert kv.device_free == 12
    assert not kv.tiers.can_move_in(request)


def test_a_request_in_flight_cannot_be_moved_out() -> None:
    kv = KVLedger(DEVICE, CPU, BLOCK)
    request = blocks_of(kv, 0, 8)
    request.progress.planned += 1
    assert not kv.tiers.can_move_out(request)


def test_a_request_larger_than_the_free_cpu_tier_cannot_be_moved_out() -> None:
    kv = KVLedger(DEVICE, 1, BLOCK)
    assert not kv.tiers.can_move_out(blocks_of(kv, 0, 5))
    assert kv.tiers.can_move_out(blocks_of(kv, 1, 4))


@pytest.mark.parametrize("sizes", [(0, 0, 4), (1, -1, 4), (1, 0, 0)])
def test_pool_sizes_are_checked(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        KVLedger(*sizes)


def test_reclaim_frees_leaked_blocks_and_no_others() -> None:
    """The KV of leaked blocks is no longer found; that of other blocks is."""
    kv = KVLedger(DEVICE, CPU, BLOCK)
    first, second = (make(number, 30, prefix=NamedPrefix(range(8), BLOCK, BLOCK)) for number in (1, 2))
    kv.grow(first, 3 * BLOCK)
    first.progress.known, first.progress.computed = 30, 3 * BLOCK
    kv.cache.offer(first)
    device, cpu = kv.device.take(2), kv.cpu.take(3)
    assert kv.device.name(device[0], b"lost")
    assert kv.adopt(second).tokens == 3 * BLOCK
    assert kv.leaked == (2, 3)
    with pytest.raises(LedgerError, match="leaked or doubled"):
        kv.check()
    assert kv.reclaim() == 5
    kv.check()
    assert kv.leaked == (0, 0)
    assert kv.device.find(b"lost") is None
    assert (kv.device_free, kv.tiers.cpu_free, kv.cache.shared_blocks) == (DEVICE - 3, CPU, 3)
    assert (device, cpu) == ([3, 4], [0, 1, 2])
