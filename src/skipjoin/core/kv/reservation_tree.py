"""Claims on the device's KV: what the ledger knows of them, whatever blocks they turn into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from skipjoin.core.kv.reservations import Account, Claim, Lender
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.step import Direction, Move


class LedgerError(AssertionError):
    """Block accounting is broken: a block leaked, doubled, or was used out of turn."""


@dataclass(eq=False, slots=True)
class RequestBlocks(Claim):
    """What one request holds: blocks, a claim, and maybe a move that has not landed.

    device, host: its blocks there; those on the host hold what follows the ones on the device. room: tokens that it may
    have on the device without another question, as the device blocks can carry them and the request's claim reaches
    that far. table: the device blocks as a frozen value for plans. keyed: how many of the first device blocks were
    offered to others. is_private: what it computes from here on is not what others would. moving: which way KV of it is
    in transit. move: what carries it; None where that is another engine's affair. regains: tokens that it had before
    the last ones were dropped.

    lends, borrows: by their place among its blocks, those of its own that another request fills from the other end, and
    those of others that it fills so; see `TwoEnds`. overwritten: how many of the former have slots whose KV the other
    request overwrites. parts: moves in transit that save such slots, each with the place of its block. aside: a move in
    transit to other device blocks. lost_from: the first device block whose KV a move lost that failed, while another
    one is in transit.
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
        """Its owner."""
        assert isinstance(self.owner, Request)
        return self.owner

    @property
    def away(self) -> int:
        """Blocks with KV that has to come back from the host before the request can run."""
        return len(self.host) + self.overwritten


@dataclass(eq=False, slots=True)
class SharedBlock:
    """A device block that two requests fill: its owner from the last slot down, the other one from the first slot up.

    index: its place among the owner's blocks. borrower, at: the other request, and the place among its blocks; None: it
    has left, and KV of the owner is on the host. split: the borrower may fill the slots below, the owner the others.
    saved: slots of the owner, its lowest ones, that the borrower overwrites. copy: a host block, which has their KV in
    the same slots; None: it is part of what the owner holds there.
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
    """The claims of requests and accounts. What a request claims is free for all to take, or lent by another request or
    an account out of what that claims itself.

    device_total: blocks that can be claimed.
    """

    def __init__(self, device_blocks: int) -> None:
        self.device_total = device_blocks
        self._held: dict[Request, RequestBlocks] = {}
        self._accounts: dict[Account, Claim] = {}
        self._root = Claim()

    @property
    def available(self) -> int:
        """Device blocks that nothing claims. Negative where claims exceed the pool."""
        return self.device_total - self._root.lent

    def footprint(self, request: Request) -> int:
        """Device blocks that the request's lender gets back if it gives up all it holds and claims; what it lends stays
        with its guests, and what it shares with the others that hold it."""
        held = self._held.get(request)
        return held.alone if held else 0

    def headroom(self, lender: Lender) -> int:
        """Blocks that a new claim can be lent: what the lender does not use, what its lenders do not use, and what is
        available."""
        return self.available + self._unused_in_all(self._claim_of(lender))

    def unused(self, lender: Request | Account) -> int:
        """Blocks that the lender claims, and neither holds nor lends; 0 if it claims none."""
        claim = self._held.get(lender) if isinstance(lender, Request) else self._accounts.get(lender)
        return claim.unused if claim is not None else 0

    def unused_without(self, account: Account, request: Request) -> int:
        """Blocks that the account has to lend once it does not lend any to the request."""
        claim, held = self._accounts[account], self._held.get(request)
        lent = claim.lent - (held.size if held is not None and held.lender is claim else 0)
        return max(0, claim.promised - lent)

    def lender_of(self, request: Request) -> Lender:
        """What the request's claim is lent out of; None: nothing, or it has none."""
        held = self._held.get(request)
        return held.lender.owner if held is not None and held.lender is not None else None

    def guests(self, lender: Request | Account) -> Iterator[Request]:
        """The requests that claim blocks which `lender` lends, in the order in which they began to."""
        claim = self._held.get(lender) if isinstance(lender, Request) else self._accounts.get(lender)
        return (guest.owner for guest in (claim.guests if claim else ()) if isinstance(guest.owner, Request))

    def lenders(self, request: Request, lender: Lender) -> frozenset[Lender]:
        """What gets blocks back for a claim of the request that `lender` lends: the request, the lender, what lends it
        its own claim, and so on to None, where blocks are free for all."""
        claim = self._claim_of(lender)
        return frozenset((request, lender, *(one.owner for one in claim.lenders())))

    def gives_back_to(self, request: Request, lenders: frozenset[Lender]) -> bool:
        """Whether all of the request's footprint comes back to one of these if it gives that up: a lender between that
        is promised as much as it has keeps it for itself."""
        held = self._held[request]
        claim, blocks = held.lender, held.alone
        while claim is not None and claim.owner not in lenders:
            if claim.size + claim.adopted - claim.promised < blocks:
                return False
            claim = claim.lender
        return True

    def shortfall_of_claim(self, request: Request, blocks: int, lender: Lender) -> int:
        """Blocks that must become available before the request can claim `blocks` in all out of `lender`. Negative:
        more than enough are."""
        held = self._held.get(request)
        if held is None:
            return blocks - self.headroom(lender)
        blocks = max(blocks, len(held.device) + held.lent)
        return blocks - held.adopted - self._freed(held, self._claim_of(lender)) - self.headroom(lender)

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The accounts that have blocks to lend."""
        return tuple(self._accounts)

    # -- accounts -----------------------------------------------------------------------------------------

    def reserve(self, account: Account, blocks: int) -> None:
        """Let the account have that many blocks to lend, or as many as are available."""
        claim = self._accounts.get(account)
        if claim is None:
            claim = self._accounts[account] = Claim(account)
            claim.join(self._root)
        claim.promised = min(blocks, max(0, claim.size + self.available))
        claim.resize()

    def draw(self, account: Account, blocks: int) -> None:
        """Take blocks from what the account has to lend, for good."""
        claim = self._accounts[account]
        if not 0 <= blocks <= claim.unused:
            raise LedgerError(f"account {account.name} gives up {blocks} blocks, and {claim.unused} are unused")
        claim.promised = claim.size - blocks
        claim.resize()

    def disband(self, account: Account) -> None:
        """Let the account have nothing to lend, until it is given blocks again. Its guests are free of it from now
        on."""
        claim = self._accounts[account]
        claim.hand_over()
        claim.promised = 0
        claim.resize()

    def _check_claims(self) -> None:
        """Raise `LedgerError` unless the claims are a tree in which every size adds up."""
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
        """Blocks that the end of the claim leaves to `lender` and its lenders. A lender between that is promised all
        that it has keeps them; one that lends more than it is promised passes them on."""
        theirs = (lender, *lender.lenders())
        claim, freed = held.lender, held.size
        while claim is not None and claim not in theirs:
            freed = claim.size + claim.adopted - max(claim.promised, len(claim.device) + claim.lent - freed)
            claim = claim.lender
        return freed

    def _unused_in_all(self, claim: Claim) -> int:
        """Blocks that the claim and its lenders do not use, of those that nothing else claims."""
        unused = 0
        while claim.lender is not None:
            unused += claim.unused
            claim = claim.lender
        return unused

    def _forget_claims(self) -> None:
        """Begin again with nothing claimed."""
        for request in self._held:
            request.claimed = UNLIMITED
        self._held.clear()
        self._accounts.clear()
        self._root = Claim()


def _name(lender: Lender) -> str:
    if lender is None:
        return "the pool"
    return f"request {lender.id}" if isinstance(lender, Request) else f"account {lender.name}"
