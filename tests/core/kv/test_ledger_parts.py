"""Parts of the ledger alone: block pool, holders, transfers and records."""

from __future__ import annotations

import pytest

from skipjoin.core.kv.block_pool import BlockPool, LedgerError
from skipjoin.core.kv.request_blocks import Holders, RequestBlocks
from skipjoin.core.kv.reservations import Reservations
from skipjoin.core.kv.transfers import Transfers
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move
from support.load import make

OUT, IN, WITHIN = Direction.OUT, Direction.IN, Direction.WITHIN
BLOCK = 4


def records(count: int) -> tuple[Reservations, dict[Request, RequestBlocks]]:
    tree, held = Reservations(20), dict[Request, RequestBlocks]()
    for number in range(count):
        request, device = make(number), [2 * number, 2 * number + 1]
        held[request] = RequestBlocks(request, BLOCK, device, tree.open(request, device))
        held[request].refresh()
    return tree, held


def test_keyed_blocks_are_reused_after_empty_ones_and_wanted_ones_last() -> None:
    pool = BlockPool(3)
    for block, key in zip(pool.take(3), (b"a", b"b"), strict=False):
        assert pool.name(block, key)
    pool.want([b"a"])
    pool.put([0, 1, 2])
    assert (pool.free, pool.cached, pool.empty) == (3, 2, 1)
    pool.check(())
    assert pool.take(3) == [2, 1, 0]
    assert pool.find(b"a") is pool.find(b"b") is None


@pytest.mark.parametrize("wanted", [(), ("before",), ("after",), ("before", "ended"), ("after", "ended")])
def test_last_blocks_of_a_prefix_are_reused_first(wanted: tuple[str, ...]) -> None:
    """Its KV is lost from the first missing block on, so that losing two of four blocks must cost two."""
    pool, keys = BlockPool(4), [b"a", b"b", b"c", b"d"]
    blocks = pool.take(4)
    for block, key in zip(blocks, keys, strict=True):
        pool.name(block, key)
    if "before" in wanted:
        pool.want(keys)
    pool.put(blocks)
    if "after" in wanted:
        pool.want(keys)
    if "ended" in wanted:
        pool.unwant(keys)
    pool.take(2)
    assert [pool.find(key) is not None for key in keys] == [True, True, False, False]


def test_a_shared_block_counts_for_its_first_holder_and_then_for_the_next() -> None:
    tree, held = records(3)
    holders, (one, two, three) = Holders(), held.values()
    for record in (one, two, three):
        record.device[:] = [0, 10 + record.request.id]
        holders.add(0, record)
        record.refresh()
    holders.check(held.values())
    assert [list(holders.counted(record)) for record in (one, two, three)] == [[0, 10], [11], [12]]
    assert tree.available == 20 - 4
    assert (holders.within({one, two}), holders.within({one, two, three})) == (0, 1)
    assert holders.remove(0, one)
    one.device.remove(0)
    one.refresh()
    assert [record.reservation.shared for record in (one, two, three)] == [0, 1, 0]
    assert tree.available == 20 - 4
    holders.check(held.values())
    assert holders.remove(0, three)
    assert not holders.remove(0, two)
    assert not holders.of


def move(held: RequestBlocks, direction: Direction, first: int = 0) -> Move:
    return Move(direction, held.request, tuple(held.device), (first, first + 1), 2 * BLOCK)


def test_a_request_has_no_room_while_its_kv_is_in_transit() -> None:
    _, held = records(1)
    (one,) = held.values()
    transfers = Transfers(held)
    assert (one.room, one.is_settled) == (2 * BLOCK, True)
    out = transfers.begin(one, move(one, OUT))
    assert (one.room, one.moving, one.is_settled, transfers.blocks[OUT]) == (0, OUT, False, 2)
    transfers.check()
    assert transfers.end(out) == (one, None)
    assert (one.room, one.moving, one.is_settled, transfers.blocks[OUT]) == (2 * BLOCK, None, True, 0)
    with pytest.raises(LedgerError, match="not in transit"):
        transfers.end(out)


def test_losses_are_reported_together_once_nothing_is_in_transit() -> None:
    _, held = records(1)
    (one,) = held.values()
    transfers = Transfers(held)
    moves = [transfers.begin_aside(one, move(one, WITHIN)), transfers.begin(one, move(one, IN, 4))]
    assert one.moving is IN
    transfers.end(moves[0])
    assert transfers.lose(one, 1) is None
    transfers.end(moves[1])
    assert transfers.lose(one, 2) == 1
    assert transfers.lose(one) is None


def test_a_move_of_dropped_slots_ends_without_its_request() -> None:
    _, held = records(1)
    (one,) = held.values()
    transfers = Transfers(held)
    saving = transfers.begin_saving(one, move(one, OUT), 1)
    assert (one.moving, one.is_settled) == (None, False)
    transfers.detach(one, 2)
    assert not one.is_settled
    transfers.detach(one, 1)
    assert one.is_settled
    transfers.check()
    held.clear()
    assert transfers.end(saving) == (None, None)
    assert transfers.blocks[OUT] == 0


def test_kv_of_another_engine_cannot_be_received_twice() -> None:
    _, held = records(1)
    (one,) = held.values()
    transfers = Transfers(held)
    transfers.expect(one)
    transfers.check()
    assert (one.moving, one.room) == (IN, 0)
    with pytest.raises(LedgerError, match="in transit"):
        transfers.expect(one)
    transfers.receive(one)
    with pytest.raises(LedgerError, match="does not expect"):
        transfers.receive(one)


def test_check_of_transfers_detects_a_lost_move_and_a_wrong_direction() -> None:
    _, held = records(1)
    (one,) = held.values()
    transfers = Transfers(held)
    transfers.begin(one, move(one, OUT))
    one.transit.direction = IN
    with pytest.raises(LedgerError, match="another direction"):
        transfers.check()
    one.transit.direction = one.transit.move = None
    with pytest.raises(LedgerError, match="counted as in transit"):
        transfers.check()


@pytest.mark.parametrize("field", ["table", "room", "swapped_out", "moving", "is_settled"])
def test_check_of_a_record_detects_a_stale_summary(field: str) -> None:
    _, held = records(1)
    (one,) = held.values()
    one.check()
    setattr(one, field, {"table": (), "moving": OUT, "is_settled": False}.get(field, 99))
    with pytest.raises(LedgerError, match="stale"):
        one.check()
