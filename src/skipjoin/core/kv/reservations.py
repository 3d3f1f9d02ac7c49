"""Claims on KV blocks: how many a holder may have in all, and out of which other claim they are lent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from skipjoin.core.request import Request


class Account(NamedTuple):
    """A lender that is no request: blocks that are kept for one purpose."""

    name: str


# What a claim is lent out of; None: what no claim has.
Lender = Request | Account | None


@dataclass(eq=False, slots=True)
class Claim:
    """Blocks that are spoken for. A claim is a count and has no place: what its owner does not use yet can be lent to
    guests, whatever blocks they then get (EconoServe section 3.2 lends regions).

    owner: None: of the root, whose guests have all that is claimed. lender: None for the root alone. promised: blocks
    that the owner may have in all, those that it holds and lends included. device: the blocks that it holds. adopted:
    how many of those are counted in another claim, whose owner holds them too. shared: how many are counted in this
    one and held by others too. guests: the claims that are lent out of this one. lent: their sizes together. size: what
    it takes out of its lender, the larger one of what is promised and what is held and lent, but for what is adopted.
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
        """Blocks that it takes out of its lender, and that are neither held nor lent."""
        return self.size + self.adopted - len(self.device) - self.lent

    @property
    def alone(self) -> int:
        """Blocks that its lender gets back when it ends: what it lends stays with its guests, and what is shared with
        those that share it."""
        return self.size - self.lent - self.shared

    def lenders(self) -> Iterator[Claim]:
        """Its lender, the lender's lender and so on; the root comes last."""
        lender = self.lender
        while lender is not None:
            yield lender
            lender = lender.lender

    def resize(self) -> None:
        """Follow a change of what is promised, held or lent, here and in the claims that it is lent out of."""
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
        """Be lent out of `lender` from now on, guests included."""
        self._part()
        self.lender = lender
        lender.guests[self] = None
        lender.lent += self.size
        lender.resize()

    def hand_over(self) -> None:
        """Let the lender lend to the guests from now on."""
        assert self.lender is not None
        for guest in list(self.guests):
            guest.join(self.lender)

    def leave(self) -> None:
        """End; the guests stay."""
        self.hand_over()
        self._part()

    def _part(self) -> None:
        if (lender := self.lender) is not None:
            del lender.guests[self]
            lender.lent -= self.size
            lender.resize()
            self.lender = None

    def problem(self) -> str:
        """What is wrong with this claim, in words; empty: nothing."""
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
