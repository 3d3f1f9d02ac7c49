"""Tree of the KV reservations of requests and accounts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from skipjoin.core.kv.reservations import Account, Claim, Lender
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.step import Direction, Move


class LedgerError(AssertionError):
    """Inconsistent block accounting: a block leaked, was allocated twice, or was used out of order."""


@dataclass(eq=False, slots=True)
class RequestBlocks(Claim):
    """Blocks, reservation and moves in transit of one request.

    Attributes:
        host: Blocks on the CPU tier, which follow those on the device.
        room: Tokens that the request may have on the device without another ledger call: limited by its blocks and its
            reservation.
        table: Device blocks as an immutable value for plans.
        keyed: Number of the first device blocks that were offered to the prefix cache.
        is_private: Whether KV computed from here on is excluded from the prefix cache, because inexact KV was swapped
            in.
        moving: Direction of the KV in transit.
        move: Move in transit; None while KV arrives from another engine.
        regains: Number of tokens before the last ones were dropped.
        lends: Bidirectional blocks that it owns, by index in its table; see `TwoEnds`.
        borrows: Bidirectional blocks of others that it fills, by index in its table.
        overwritten: Number of lent blocks in which the borrower overwrites some of its slots.
        parts: Moves in transit that save such slots, with the index of their block.
        aside: Move in transit to other device blocks.
        lost_from: Index of the first device block that a failed move lost, while another move is in transit.
    """

    host: list[int] = field(default_factory=list)
    room: int = 0
    table: tuple[int, ...] = ()
    keyed: int = 0
    is_private: bool = False
    moving: Direction | None = None
    move: Move | None = None
    regains: int = 0
    lends: dict[int, SharedBlock] = field(default_factory=dict)
    borrows: dict[int, SharedBlock] = field(default_factory=dict)
    overwritten: int = 0
    parts: dict[Move, int] = field(default_factory=dict)
    aside: Move | None = None
    lost_from: int | None = None

    @property
    def request(self) -> Request:
        assert isinstance(self.owner, Request)
        return self.owner

    @property
    def away(self) -> int:
        """Number of blocks with KV that must be swapped in before the request can run."""
        return len(self.host) + self.overwritten


@dataclass(eq=False, slots=True)
class SharedBlock:
    """Bidirectional block: its owner fills it from the last slot down, the borrower from the first slot up.

    Attributes:
        index: Index in the owner's table.
        copy: CPU-tier block with the saved slots at the same positions; None once it is part of the owner's swapped-out
            blocks.
        borrower: None after it left while some of the owner's slots are still saved.
        at: Index in the borrower's table.
        split: The borrower may fill the slots below, the owner the slots from here on.
        saved: Number of the owner's lowest slots that the borrower overwrites.
    """

    block: int
    owner: RequestBlocks
    index: int
    copy: int | None
    borrower: RequestBlocks | None = None
    at: int = 0
    split: int = 0
    saved: int = 0


class ClaimTree:
    """Reservations of requests and accounts, taken from the shared pool or from a parent reservation.

    Attributes:
        device_total: Number of blocks that can be reserved.
    """

    def __init__(self, device_blocks: int) -> None:
        self.device_total = device_blocks
        self._held: dict[Request, RequestBlocks] = {}
        self._accounts: dict[Account, Claim] = {}
        self._root = Claim()

    @property
    def available(self) -> int:
        return self.device_total - self._root.lent

    def footprint(self, request: Request) -> int:
        """Return how many blocks the parent regains if the request is evicted.

        Lent and shared blocks stay with their users.
        """
        held = self._held.get(request)
        return held.alone if held else 0

    def headroom(self, lender: Lender) -> int:
        return self.available + self._unused_in_all(self._claim_of(lender))

    def unused(self, lender: Request | Account) -> int:
        claim = self._held.get(lender) if isinstance(lender, Request) else self._accounts.get(lender)
        return claim.unused if claim is not None else 0

    def unused_without(self, account: Account, request: Request) -> int:
        claim, held = self._accounts[account], self._held.get(request)
        lent = claim.lent - (held.size if held is not None and held.lender is claim else 0)
        return max(0, claim.promised - lent)

    def lender_of(self, request: Request) -> Lender:
        held = self._held.get(request)
        return held.lender.owner if held is not None and held.lender is not None else None

    def guests(self, lender: Request | Account) -> Iterator[Request]:
        """Return the requests with reservations nested in that of `lender`, oldest first."""
        claim = self._held.get(lender) if isinstance(lender, Request) else self._accounts.get(lender)
        return (guest.owner for guest in (claim.guests if claim else ()) if isinstance(guest.owner, Request))

    def lenders(self, request: Request, lender: Lender) -> frozenset[Lender]:
        claim = self._claim_of(lender)
        return frozenset((request, lender, *(one.owner for one in claim.lenders())))

    def gives_back_to(self, request: Request, lenders: frozenset[Lender]) -> bool:
        """Return whether the whole footprint reaches one of `lenders`.

        An ancestor in between keeps the blocks if it is promised as much as it has.
        """
        held = self._held[request]
        claim, blocks = held.lender, held.alone
        while claim is not None and claim.owner not in lenders:
            if claim.size + claim.adopted - claim.promised < blocks:
                return False
            claim = claim.lender
        return True

    def shortfall_of_claim(self, request: Request, blocks: int, lender: Lender) -> int:
        held = self._held.get(request)
        if held is None:
            return blocks - self.headroom(lender)
        blocks = max(blocks, len(held.device) + held.lent)
        return blocks - held.adopted - self._freed(held, self._claim_of(lender)) - self.headroom(lender)

    @property
    def accounts(self) -> tuple[Account, ...]:
        return tuple(self._accounts)

    # -- accounts -----------------------------------------------------------------------------------------

    def reserve(self, account: Account, blocks: int) -> None:
        claim = self._accounts.get(account)
        if claim is None:
            claim = self._accounts[account] = Claim(account)
            claim.join(self._root)
        claim.promised = min(blocks, max(0, claim.size + self.available))
        claim.resize()

    def draw(self, account: Account, blocks: int) -> None:
        claim = self._accounts[account]
        if not 0 <= blocks <= claim.unused:
            raise LedgerError(f"account {account.name} gives up {blocks} blocks, and {claim.unused} are unused")
        claim.promised = claim.size - blocks
        claim.resize()

    def disband(self, account: Account) -> None:
        """Leave the account without blocks to lend. Its guests move to the shared pool."""
        claim = self._accounts[account]
        claim.hand_over()
        claim.promised = 0
        claim.resize()

    def _check_claims(self) -> None:
        """Raise `LedgerError` unless the reservations form a tree in which all sizes add up."""
        left: list[Claim] = [self._root]
        found = 0
        while left:
            claim = left.pop()
            if problem := claim.problem():
                raise LedgerError(f"the claim of {_name(claim.owner)} {problem}")
            found += 1
            left.extend(claim.guests)
        if found != 1 + len(self._held) + len(self._accounts):
            raise LedgerError(f"{len(self._held) + len(self._accounts)} claims are known, and {found - 1} are lent")

    def _claim_of(self, lender: Lender) -> Claim:
        if lender is None:
            return self._root
        claim = self._held.get(lender) if isinstance(lender, Request) else self._accounts.get(lender)
        if claim is None:
            raise LedgerError(f"{_name(lender)} lends blocks, and claims none")
        return claim

    def _freed(self, held: Claim, lender: Claim) -> int:
        """Return how many blocks `lender` and its ancestors gain when the reservation ends.

        An ancestor in between that is promised all it has keeps them; one that lends more than it is promised passes
        them on.
        """
        theirs = (lender, *lender.lenders())
        claim, freed = held.lender, held.size
        while claim is not None and claim not in theirs:
            freed = claim.size + claim.adopted - max(claim.promised, len(claim.device) + claim.lent - freed)
            claim = claim.lender
        return freed

    def _unused_in_all(self, claim: Claim) -> int:
        """Return the number of unused blocks of the reservation and its ancestors below the root."""
        unused = 0
        while claim.lender is not None:
            unused += claim.unused
            claim = claim.lender
        return unused

    def _forget_claims(self) -> None:
        for request in self._held:
            request.claimed = UNLIMITED
        self._held.clear()
        self._accounts.clear()
        self._root = Claim()


def _name(lender: Lender) -> str:
    if lender is None:
        return "the pool"
    return f"request {lender.id}" if isinstance(lender, Request) else f"account {lender.name}"
