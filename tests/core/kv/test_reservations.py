from __future__ import annotations

import pytest

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.reservations import Account, Reservation, Reservations
from support.load import make

BLOCKS = 12
PROMPTS = Account("prompts")


def nested() -> tuple[Reservations, list[Reservation]]:
    tree, requests = Reservations(BLOCKS), [make(number) for number in range(3)]
    opened = [tree.open(request, []) for request in requests]
    for request, parent, blocks in zip(requests, (None, *requests), (10, 6, 2), strict=False):
        tree.promise(request, blocks, parent)
    return tree, opened


def test_nested_reservations_take_unused_blocks_of_their_parent() -> None:
    tree, (first, second, third) = nested()
    assert (tree.available, first.unused, second.unused, third.unused) == (2, 4, 4, 2)
    assert tree.headroom(third.owner) == 2 + 4 + 4 + 2
    third.held = range(9)  # more than is promised, so its ancestors grow as well
    third.resize()
    assert (third.size, second.size, first.size, tree.available) == (9, 9, 10, 2)
    tree.check()


def test_the_parent_of_a_closed_reservation_takes_over_its_nested_ones() -> None:
    tree, (first, second, third) = nested()
    tree.close(second.owner)
    assert third.parent is first
    assert (tree.parent_of(third.owner), first.unused, tree.available) == (first.owner, 8, 2)
    tree.check()


def test_a_reservation_cannot_be_nested_in_itself() -> None:
    tree, (first, second, third) = nested()
    for parent in (first, second, third):
        with pytest.raises(LedgerError, match="of its own reservation"):
            tree.promise(first.owner, 1, parent.owner)
    with pytest.raises(LedgerError, match="has no reservation"):
        tree.promise(first.owner, 1, make(9))


def test_blocks_evicted_within_a_reservation_do_not_return_to_the_pool() -> None:
    tree, (first, second, third) = nested()
    other = tree.open(make(3))
    assert tree.sources(third.owner, second.owner) == {third.owner, second.owner, first.owner, None}
    assert tree.returns_to(third.owner, frozenset((second.owner,)))
    # The first reservation is promised all that it has, so nothing reaches the pool.
    assert not tree.returns_to(third.owner, tree.sources(other.owner, None))


def test_an_account_is_funded_from_available_blocks_and_gives_unused_ones() -> None:
    tree, (_, second, _) = nested()
    tree.fund(PROMPTS, 5)
    assert (tree.unused(PROMPTS), tree.available) == (2, 0)
    tree.promise(second.owner, 6, PROMPTS)
    assert (tree.unused(PROMPTS), tree.unused_without(PROMPTS, second.owner), tree.available) == (0, 2, -4)
    with pytest.raises(LedgerError, match="0 are unused"):
        tree.draw(PROMPTS, 1)
    tree.empty_accounts()
    assert (tree.parent_of(second.owner), tree.unused(PROMPTS), tree.available) == (None, 0, -4)
    tree.check()
