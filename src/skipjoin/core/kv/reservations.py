"""Reservations of KV blocks: how many blocks an owner may have, and which parent reservation they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from skipjoin.core.request import Request


class Account(NamedTuple):
    """Parent reservation that belongs to no request: blocks reserved for one purpose."""

    name: str


# Owner of a parent reservation; None for the root, the shared pool.
Lender = Request | Account | None


@dataclass(eq=False, slots=True)
class Claim:
    """Reservation of a number of blocks; concrete blocks are assigned on allocation.

    Reservations form a tree: unused blocks of one can be lent to nested ones (guests), whatever blocks these then get
    (EconoServe section 3.2 lends regions).

    Attributes:
        owner: None for the root, whose guests hold everything that is reserved.
        lender: Parent reservation; None only for the root.
        promised: Number of blocks that the owner may have in total, including those that it holds and lends.
        device: Blocks that the owner holds.
        adopted: Number of held blocks that are counted in the reservation of another holder.
        shared: Number of blocks counted here that others hold too.
        guests: Nested reservations.
        lent: Total size of the guests.
        size: Blocks taken from the parent: the maximum of `promised` and of blocks held and lent, minus `adopted`.
    """

    owner: Lender = None
    lender: Claim | None = None
    promised: int = 0
    device: list[int] = field(default_factory=list)
    adopted: int = 0
    shared: int = 0
    guests: dict[Claim, None] = field(default_factory=dict)
    lent: int = 0
    size: int = 0

    @property
    def unused(self) -> int:
        """Number of blocks taken from the parent that are neither held nor lent."""
        return self.size + self.adopted - len(self.device) - self.lent

    @property
    def alone(self) -> int:
        """Number of blocks that return to the parent when this reservation ends.

        Lent and shared blocks stay with their users.
        """
        return self.size - self.lent - self.shared

    def lenders(self) -> Iterator[Claim]:
        """Iterate over the ancestors, from the parent to the root."""
        lender = self.lender
        while lender is not None:
            yield lender
            lender = lender.lender

    def resize(self) -> None:
        """Update `size` and the ancestors after a change of what is promised, held or lent."""
        claim = self
        while (lender := claim.lender) is not None:
            promised, used = claim.promised, len(claim.device) + claim.lent
            size = (promised if promised > used else used) - claim.adopted
            change = size - claim.size
            if not change:
                return
            claim.size = size
            lender.lent += change
            claim = lender

    def join(self, lender: Claim) -> None:
        """Move this reservation, with its guests, to another parent."""
        self._part()
        self.lender = lender
        lender.guests[self] = None
        lender.lent += self.size
        lender.resize()

    def hand_over(self) -> None:
        """Move the guests to the parent."""
        assert self.lender is not None
        for guest in list(self.guests):
            guest.join(self.lender)

    def leave(self) -> None:
        """Remove this reservation from the tree; its guests move to the parent."""
        self.hand_over()
        self._part()

    def _part(self) -> None:
        if (lender := self.lender) is not None:
            del lender.guests[self]
            lender.lent -= self.size
            lender.resize()
            self.lender = None

    def problem(self) -> str:
        """Return what is inconsistent about this reservation, or an empty string."""
        lent = 0
        for guest in self.guests:
            lent += guest.size
            if guest.lender is not self:
                return "has a guest of another lender"
        if self.lent != lent:
            return "counts other blocks as lent than its guests claim"
        if self.lender is not None and self.size != max(self.promised, len(self.device) + self.lent) - self.adopted:
            return "has another size than what is promised, held and lent"
        return ""
