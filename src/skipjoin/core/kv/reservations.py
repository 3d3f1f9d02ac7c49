from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.request import Request


class Account(NamedTuple):
    """Parent reservation that belongs to no request: blocks reserved for one purpose."""

    name: str


# Owner of a parent reservation; None for the root, the shared pool.
Owner = Request | Account | None


@dataclass(eq=False, slots=True)
class Reservation:
    """Reservation of a number of blocks; nested ones use blocks that their parent does not (EconoServe section 3.2).

    The size is what it takes from the parent: the maximum of `promised` and of blocks held and nested, minus `adopted`.
    """

    owner: Owner = None
    held: Sized = ()  # by the owner; the ledger changes them and then calls `resize`
    parent: Reservation | None = None
    promised: int = 0  # blocks that the owner may have in total, with those of nested reservations
    adopted: int = 0  # held blocks that are counted in the reservation of another holder
    shared: int = 0  # blocks counted here that others hold too
    nested: dict[Reservation, None] = field(default_factory=dict)
    nested_blocks: int = 0
    size: int = 0

    @property
    def unused(self) -> int:
        return self.size + self.adopted - len(self.held) - self.nested_blocks

    @property
    def alone(self) -> int:
        return self.size - self.nested_blocks - self.shared

    def ancestors(self) -> Iterator[Reservation]:
        parent = self.parent
        while parent is not None:
            yield parent
            parent = parent.parent

    def resize(self) -> None:
        this = self
        while (parent := this.parent) is not None:
            promised, used = this.promised, len(this.held) + this.nested_blocks
            size = (promised if promised > used else used) - this.adopted
            change = size - this.size
            if not change:
                return
            this.size = size
            parent.nested_blocks += change
            this = parent

    def join(self, parent: Reservation) -> None:
        self._part()
        self.parent = parent
        parent.nested[self] = None
        parent.nested_blocks += self.size
        parent.resize()

    def hand_over(self) -> None:
        assert self.parent is not None
        for nested in list(self.nested):
            nested.join(self.parent)

    def leave(self) -> None:
        self.hand_over()
        self._part()

    def _part(self) -> None:
        if (parent := self.parent) is not None:
            del parent.nested[self]
            parent.nested_blocks -= self.size
            parent.resize()
            self.parent = None

    def check(self) -> None:
        problem, nested = "", self.nested
        if nested and any(child.parent is not self for child in nested):
            problem = "contains a reservation with another parent"
        elif self.nested_blocks != (sum(child.size for child in nested) if nested else 0):
            problem = "counts other blocks as nested than its nested reservations take"
        elif (
            self.parent is not None
            and self.size != max(self.promised, len(self.held) + self.nested_blocks) - self.adopted
        ):
            problem = "has another size than what is promised, held and nested"
        if problem:
            raise LedgerError(f"the reservation of {_name(self.owner)} {problem}")


class Reservations:
    def __init__(self, blocks: int) -> None:
        self.root = Reservation()
        self.total = blocks
        self._of: dict[Request | Account, Reservation] = {}

    @property
    def available(self) -> int:
        return self.total - self.root.nested_blocks

    @property
    def is_flat(self) -> bool:
        return len(self.root.nested) == len(self._of)

    def open(self, owner: Request | Account, held: Sized = ()) -> Reservation:
        reservation = self._of[owner] = Reservation(owner, held)
        reservation.join(self.root)
        return reservation

    def close(self, request: Request) -> None:
        self._of.pop(request).leave()

    def find(self, parent: Owner) -> Reservation:
        if parent is None:
            return self.root
        reservation = self._of.get(parent)
        if reservation is None:
            raise LedgerError(f"{_name(parent)} is a parent, and has no reservation")
        return reservation

    def footprint(self, request: Request) -> int:
        reservation = self._of.get(request)
        return reservation.alone if reservation is not None else 0

    def shortfall(self, request: Request, blocks: int, parent: Owner) -> int:
        this = self._of.get(request)
        if this is None:
            return blocks - self.headroom(parent)
        blocks = max(blocks, len(this.held) + this.nested_blocks)
        if parent is None and this.parent is self.root:  # most requests
            return blocks - this.adopted - this.size - self.available
        return blocks - this.adopted - self._freed(this, self.find(parent)) - self.headroom(parent)

    def headroom(self, parent: Owner) -> int:
        return self.available + self.unused_in_all(self.find(parent))

    def unused(self, owner: Request | Account) -> int:
        reservation = self._of.get(owner)
        return reservation.unused if reservation is not None else 0

    def with_unused(self, least: int) -> list[tuple[int, int, Request]]:
        # `Reservation.unused` in place, as in `unused_in_all`, because a call takes as long as the rest.
        return [
            (unused, owner.id, owner)
            for owner, this in self._of.items()
            if (unused := this.size + this.adopted - len(this.held) - this.nested_blocks) >= least
            and isinstance(owner, Request)
        ]

    def unused_without(self, account: Account, request: Request) -> int:
        reservation, nested = self._of[account], self._of.get(request)
        nested_blocks = reservation.nested_blocks - (
            nested.size if nested is not None and nested.parent is reservation else 0
        )
        return max(0, reservation.promised - nested_blocks)

    def overdrawn(self, account: Account) -> int:
        this = self._of.get(account)
        return max(0, this.nested_blocks - this.promised) if this is not None else 0

    def parent_of(self, request: Request) -> Owner:
        this = self._of.get(request)
        return this.parent.owner if this is not None and this.parent is not None else None

    def sources(self, request: Request, parent: Owner) -> frozenset[Owner]:
        this = self.find(parent)
        return frozenset((request, parent, *(ancestor.owner for ancestor in this.ancestors())))

    def returns_to(self, request: Request, owners: frozenset[Owner]) -> bool:
        # An ancestor in between keeps the blocks if it is promised as much as it has.
        this = self._of[request]
        parent = this.parent
        while parent is not None and parent.owner not in owners:
            if parent.size + parent.adopted - parent.promised < this.alone:
                return False
            parent = parent.parent
        return True

    def unused_in_all(self, reservation: Reservation) -> int:
        unused, this = 0, reservation
        while (parent := this.parent) is not None:
            unused += this.size + this.adopted - len(this.held) - this.nested_blocks
            this = parent
        return unused

    def _freed(self, this: Reservation, parent: Reservation) -> int:
        theirs = (parent, *parent.ancestors())
        ancestor, freed = this.parent, this.size
        while ancestor is not None and ancestor not in theirs:
            freed = (
                ancestor.size
                + ancestor.adopted
                - max(ancestor.promised, len(ancestor.held) + ancestor.nested_blocks - freed)
            )
            ancestor = ancestor.parent
        return freed

    def promise(self, request: Request, blocks: int, parent: Owner) -> None:
        outer, this = self.find(parent), self._of[request]
        if this is outer or this in outer.ancestors():
            raise LedgerError(f"request {request.id} reserves blocks of its own reservation")
        if this.parent is not outer:
            this.join(outer)
        this.promised = blocks
        this.resize()

    def fund(self, account: Account, blocks: int) -> None:
        this = self._of.get(account) or self.open(account)
        this.promised = min(blocks, max(0, this.size + self.available))
        this.resize()

    def draw(self, account: Account, blocks: int) -> None:
        this = self._of[account]
        if not 0 <= blocks <= this.unused:
            raise LedgerError(f"account {account.name} gives {blocks} blocks, and {this.unused} are unused")
        this.promised = this.size - blocks
        this.resize()

    def empty_accounts(self) -> None:
        for owner, this in self._of.items():
            if isinstance(owner, Account):
                this.hand_over()
                this.promised = 0
                this.resize()

    def check(self) -> None:
        left, found = [self.root], set[Owner]()
        while left:
            reservation = left.pop()
            reservation.check()
            found.add(reservation.owner)
            left.extend(reservation.nested)
        if found != {None, *self._of}:
            raise LedgerError(f"{len(self._of)} reservations are known, and {len(found) - 1} are in the tree")


def _name(owner: Owner) -> str:
    if owner is None:
        return "the pool"
    return f"request {owner.id}" if isinstance(owner, Request) else f"account {owner.name}"
