"""Block accounting: nothing leaks, nothing doubles, and misuse is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from skipjoin.core.claims import Account, Lender
from skipjoin.core.kv import KVLedger, LedgerError
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move
from support.load import make

DEVICE, HOST, BLOCK = 12, 8, 4
ACCOUNT = Account("prompts")


class LedgerMachine(RuleBasedStateMachine):
    """Requests that hold, grow, move and go, in any order that the ledger allows; what it forbids must raise."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVLedger(DEVICE, HOST, BLOCK)
        self.kv.reserve(ACCOUNT, 2)
        self.transit: dict[Request, tuple[Move, bool]] = {}
        self.count = 0

    def on_device(self, request: Request) -> bool:
        held = self.kv.blocks_of(request)
        return held is None or (not held.host and request not in self.transit)

    @rule(target=requests)
    def new(self) -> Request:
        self.count += 1
        return make(self.count, 1000)

    @rule(
        request=requests,
        blocks=st.integers(0, DEVICE),
        tokens=st.none() | st.integers(0, DEVICE * BLOCK),
        lender=st.none() | st.just(ACCOUNT) | requests,
    )
    def claim(self, request: Request, blocks: int, tokens: int | None, lender: Lender) -> None:
        kv = self.kv
        if not self.on_device(request):
            return
        if not (lender in (None, ACCOUNT) or (isinstance(lender, Request) and kv.blocks_of(lender))):
            with pytest.raises(LedgerError, match="and claims none"):
                kv.claim(request, blocks, lender=lender)
        elif request in self.lenders(lender):
            with pytest.raises(LedgerError, match="lends itself"):
                kv.claim(request, blocks, lender=lender)
        elif kv.shortfall_of_claim(request, blocks, lender) <= 0:
            available = kv.available
            kv.claim(request, blocks, tokens=tokens, lender=lender)
            assert kv.available >= min(0, available)
            assert kv.lender_of(request) == lender
            assert lender is None or request in kv.guests(lender)
            held = kv.blocks_of(request)
            assert held is not None
            assert held.room == min(len(held.device) * BLOCK, request.claimed)

    def lenders(self, lender: Lender) -> set[Request]:
        """The lender, where it is a request, and all that lend it its own claim."""
        found: set[Request] = set()
        one: Lender = lender
        while isinstance(one, Request):
            found.add(one)
            one = self.kv.lender_of(one)
        return found

    @rule(blocks=st.integers(0, DEVICE))
    def reserve(self, blocks: int) -> None:
        available = self.kv.available
        self.kv.reserve(ACCOUNT, blocks)
        assert self.kv.available >= min(0, available)
        if blocks <= available:
            assert self.kv.unused(ACCOUNT) <= blocks

    @rule(share=st.floats(0, 1))
    def draw(self, share: float) -> None:
        blocks, available = int(share * self.kv.unused(ACCOUNT)), self.kv.available
        self.kv.draw(ACCOUNT, blocks)
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
            assert self.kv.slots(request) == tuple(held.device)
            # Who keeps to the shortfall takes nothing that others were promised.
            assert self.kv.available >= min(0, available)
        elif self.kv.blocks_for(tokens) > DEVICE:
            with pytest.raises(LedgerError, match="are free"):
                self.kv.grow(request, tokens)

    @rule(request=requests, share=st.floats(0, 1))
    def compute(self, request: Request, share: float) -> None:
        held = self.kv.blocks_of(request)
        if held is not None and self.on_device(request):
            request.computed = request.planned = max(request.computed, int(share * held.room))

    @rule(request=consumes(requests))
    def release(self, request: Request) -> None:
        if request in self.transit:
            with pytest.raises(LedgerError, match="in transit"):
                self.kv.release(request)
            self.land(request)
        self.kv.release(request)
        assert self.kv.blocks_of(request) is None
        assert self.kv.footprint(request) == 0

    @rule(request=requests, blocking=st.booleans())
    def move_out(self, request: Request, blocking: bool) -> None:
        if self.kv.blocks_of(request) is None:
            return
        if not self.kv.can_move_out(request):
            with pytest.raises(LedgerError, match="cannot be moved out"):
                self.kv.move_out(request, blocking=blocking)
            return
        free = self.kv.device_free
        table = self.kv.slots(request)
        move = self.kv.move_out(request, blocking=blocking)
        assert move.source == table[: self.kv.blocks_for(request.computed)]
        assert len(move.target) == len(move.source) == self.kv.blocks_for(move.tokens)
        assert move.tokens == request.computed
        # Beside a step, what the copy reads stays fenced until it lands.
        assert self.kv.device_free - free == (len(table) if blocking else len(table) - len(move.source))
        self.transit[request] = (move, blocking)

    @rule(request=requests)
    def move_in(self, request: Request) -> None:
        if self.kv.blocks_of(request) is None:
            return
        if not self.kv.can_move_in(request):
            with pytest.raises(LedgerError, match="cannot be moved in"):
                self.kv.move_in(request)
            return
        host_free = self.kv.host_free
        move = self.kv.move_in(request)
        assert self.kv.available >= 0, "the move took blocks that others were promised"
        assert self.kv.host_free == host_free, "the host blocks must stay fenced"
        assert self.kv.slots(request) == move.target
        assert move.tokens == request.computed
        self.transit[request] = (move, True)

    @rule(request=requests)
    def land(self, request: Request) -> None:
        if request not in self.transit:
            return
        move, _ = self.transit.pop(request)
        assert not self.kv.is_settled(request)
        self.kv.land(move)
        assert self.kv.is_settled(request)
        held = self.kv.blocks_of(request)
        assert held is not None
        if move.direction is Direction.OUT:
            assert (held.device, held.host, held.room) == ([], list(move.target), 0)
        else:
            assert held.host == []
            assert tuple(held.device)[: len(move.target)] == move.target
        with pytest.raises(LedgerError, match="not in transit"):
            self.kv.land(move)

    @rule(request=requests)
    def fail(self, request: Request) -> None:
        if request not in self.transit:
            return
        move, blocking = self.transit.pop(request)
        table = self.kv.slots(request)
        is_whole = self.kv.fail(move)
        assert is_whole == (move.direction is Direction.OUT and not blocking)
        assert self.kv.is_settled(request)
        with pytest.raises(LedgerError, match="not in transit"):
            self.kv.fail(move)
        held = self.kv.blocks_of(request)
        assert held is not None
        assert held.host == []
        if is_whole:
            assert self.kv.slots(request) == table == move.source
        else:
            self.kv.release(request)
            request.computed = request.planned = 0

    @invariant()
    def conserved(self) -> None:
        kv = self.kv
        for direction in Direction:
            blocks = sum(len(move.source) for move, _ in self.transit.values() if move.direction is direction)
            assert kv.blocks_in_transit[direction] == blocks
        assert kv.is_moving == bool(self.transit)
        kv.check()
        held = [kv.blocks_of(request) for request in kv.holders()]
        assert kv.device_free + sum(len(one.device) for one in held if one) == DEVICE
        assert kv.host_free + sum(len(one.host) for one in held if one) == HOST
        top = sum(self.size(one) for one in kv.holders() if kv.lender_of(one) is None)
        account = max(kv._accounts[ACCOUNT].promised, sum(map(self.size, kv.guests(ACCOUNT))))
        assert kv.available == DEVICE - top - account

    def size(self, request: Request) -> int:
        held = self.kv.blocks_of(request)
        assert held is not None
        return max(held.promised, len(held.device) + sum(map(self.size, self.kv.guests(request))))

    def teardown(self) -> None:
        for request in list(self.transit):
            self.land(request)
        for request in list(self.kv.holders()):
            self.kv.release(request)
        self.kv.check()
        self.kv.reserve(ACCOUNT, 0)
        assert (self.kv.device_free, self.kv.host_free, self.kv.available) == (DEVICE, HOST, DEVICE)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def blocks_of(kv: KVLedger, number: int, tokens: int) -> Request:
    """A request whose `tokens` tokens are computed on the device."""
    request = make(number, tokens)
    kv.grow(request, tokens)
    request.computed = request.planned = tokens
    return request


def leak(kv: KVLedger) -> None:
    kv._device_free.pop()


def leak_host(kv: KVLedger) -> None:
    kv._host_free.pop()


def double(kv: KVLedger) -> None:
    kv._device_free.append(kv._device_free[-1])


def double_between_holders(kv: KVLedger) -> None:
    one, other = (kv.blocks_of(request) for request in list(kv.holders())[:2])
    assert one is not None
    assert other is not None
    one.device[0] = other.device[0]


def swap_for_a_foreign_block(kv: KVLedger) -> None:
    kv._device_free[0] = DEVICE + 5


def stale_table(kv: KVLedger) -> None:
    held = kv.blocks_of(next(kv.holders()))
    assert held is not None
    held.table = held.table[::-1]


def stale_room(kv: KVLedger) -> None:
    held = kv.blocks_of(next(kv.holders()))
    assert held is not None
    held.room += BLOCK


def lose_a_claim(kv: KVLedger) -> None:
    kv._root.lent -= 1


def claim_too_little(kv: KVLedger) -> None:
    held = kv.blocks_of(next(kv.holders()))
    assert held is not None
    held.size -= 1


def lose_a_lender(kv: KVLedger) -> None:
    kv._held.popitem()


def claim_in_a_circle(kv: KVLedger) -> None:
    one, other = (kv.blocks_of(request) for request in list(kv.holders())[:2])
    assert one is not None
    assert other is not None
    one._part()
    other._part()
    one.lender, other.lender = other, one


def compute_beyond_the_blocks(kv: KVLedger) -> None:
    next(kv.holders()).computed = 100


def lose_count_of_transit(kv: KVLedger) -> None:
    kv.blocks_in_transit[Direction.OUT] += 1


def lie_on_both_tiers(kv: KVLedger) -> None:
    held = kv.blocks_of(next(kv.holders()))
    assert held is not None
    held.host.append(kv._host_free.pop())


@pytest.mark.parametrize(
    "corrupt",
    [
        leak,
        leak_host,
        double,
        double_between_holders,
        swap_for_a_foreign_block,
        stale_table,
        stale_room,
        lose_a_claim,
        claim_too_little,
        lose_a_lender,
        claim_in_a_circle,
        compute_beyond_the_blocks,
        lie_on_both_tiers,
        lose_count_of_transit,
    ],
)
def test_the_check_finds(corrupt: Callable[[KVLedger], None]) -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    blocks_of(kv, 0, 9)
    kv.claim(blocks_of(kv, 1, 5), 4)
    kv.check()
    corrupt(kv)
    with pytest.raises(LedgerError):
        kv.check()


def test_expected_kv_is_fenced_until_it_is_there() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    request = make(0, 10)
    request.computed = 10
    kv.expect(request)
    kv.check()
    assert kv.device_free == DEVICE - 3
    assert (kv.is_settled(request), kv.is_moving, kv.can_move_out(request)) == (False, False, False)
    for wrong in (kv.release, kv.expect):
        with pytest.raises(LedgerError, match="in transit"):
            wrong(request)
    kv.receive(request)
    with pytest.raises(LedgerError, match="does not expect"):
        kv.receive(request)
    kv.check()
    kv.release(request)
    assert kv.device_free == DEVICE


def test_blocks_are_handed_out_lowest_first_and_again_in_the_same_order() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    first = blocks_of(kv, 0, 12)
    assert kv.slots(first) == (0, 1, 2)
    kv.release(first)
    assert kv.slots(blocks_of(kv, 1, 12)) == (0, 1, 2)


def test_a_promise_is_not_a_block() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    owner, other = make(0), make(1)
    kv.claim(owner, 10)
    assert (kv.device_free, kv.available) == (12, 2)
    assert kv.shortfall(owner, 40) == 0
    assert kv.shortfall(other, 12) == 1
    kv.grow(owner, 20)
    assert (kv.device_free, kv.available) == (7, 2)
    kv.release(owner)
    assert (kv.device_free, kv.available) == (12, 12)


def test_a_move_before_the_step_frees_at_once_and_one_beside_it_when_it_lands() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    one, other = blocks_of(kv, 0, 8), blocks_of(kv, 1, 8)
    kv.land(kv.move_out(one, blocking=True))
    assert kv.device_free == 10
    move = kv.move_out(other, blocking=False)
    assert kv.device_free == 10
    kv.land(move)
    assert kv.device_free == 12


def on_host(kv: KVLedger, number: int, tokens: int) -> Request:
    """A request whose KV has moved out."""
    request = blocks_of(kv, number, tokens)
    kv.land(kv.move_out(request, blocking=True))
    return request


def test_a_failed_move_out_beside_a_step_leaves_the_kv_where_it_was() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    request = blocks_of(kv, 0, 8)
    table = kv.slots(request)
    move = kv.move_out(request, blocking=False)
    assert (kv.device_free, kv.host_free) == (10, 6)
    assert kv.blocks_in_transit == {Direction.OUT: 2, Direction.IN: 0}
    assert kv.fail(move)
    assert (kv.device_free, kv.host_free, kv.is_moving) == (10, 8, False)
    assert kv.slots(request) == table
    assert kv.grow(request, 9).room == 12
    kv.check()


def test_a_failed_move_out_before_a_step_has_lost_the_kv() -> None:
    """The step may have written where it lay."""
    kv = KVLedger(DEVICE, HOST, BLOCK)
    request = blocks_of(kv, 0, 8)
    move = kv.move_out(request, blocking=True)
    assert not kv.fail(move)
    assert (kv.device_free, kv.host_free, kv.is_moving) == (12, 8, False)
    kv.release(request)
    request.computed = 0
    kv.check()


@pytest.mark.parametrize("grows", [False, True])
def test_a_failed_move_in_has_lost_the_kv(grows: bool) -> None:
    """Before a step, which may have given it more blocks, as beside one."""
    kv = KVLedger(DEVICE, HOST, BLOCK)
    request = on_host(kv, 0, 8)
    move = kv.move_in(request)
    assert kv.blocks_in_transit == {Direction.OUT: 0, Direction.IN: 2}
    if grows:
        kv.grow(request, 9)
    assert (kv.device_free, kv.host_free) == (9 if grows else 10, 6)
    assert not kv.fail(move)
    assert (kv.host_free, kv.is_moving) == (8, False)
    kv.release(request)
    assert (kv.device_free, kv.host_free) == (12, 8)
    request.computed = 0
    kv.check()


def test_a_move_ends_once_however_it_ends() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    move = kv.move_out(blocks_of(kv, 0, 8), blocking=False)
    kv.fail(move)
    with pytest.raises(LedgerError, match="not in transit"):
        kv.land(move)


def test_a_move_out_takes_computed_blocks_only_and_ends_the_promise() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    request = make(0, 40)
    kv.claim(request, 10)
    kv.grow(request, 24)
    request.computed = request.planned = 5
    move = kv.move_out(request, blocking=False)
    assert (move.source, kv.device_free, kv.available) == ((0, 1), 10, 10)


def test_a_move_in_does_not_take_what_others_were_promised() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    request = blocks_of(kv, 0, 16)
    kv.land(kv.move_out(request, blocking=True))
    kv.claim(make(1), 9)
    assert kv.device_free == 12
    assert not kv.can_move_in(request)


def test_a_request_in_flight_cannot_be_moved_out() -> None:
    kv = KVLedger(DEVICE, HOST, BLOCK)
    request = blocks_of(kv, 0, 8)
    request.planned += 1
    assert not kv.can_move_out(request)


def test_a_full_host_takes_nobody() -> None:
    kv = KVLedger(DEVICE, 1, BLOCK)
    assert not kv.can_move_out(blocks_of(kv, 0, 5))
    assert kv.can_move_out(blocks_of(kv, 1, 4))


@pytest.mark.parametrize("sizes", [(0, 0, 4), (1, -1, 4), (1, 0, 0)])
def test_pool_sizes_are_checked(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        KVLedger(*sizes)
