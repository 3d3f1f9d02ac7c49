"""KVLedger: the one owner of KV block accounting on both tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from skipjoin.core.claims import Account, Claim, Lender
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.step import Direction, Move


class LedgerError(AssertionError):
    """Block accounting is broken: a block leaked, doubled, or was used out of turn."""


@dataclass(eq=False, slots=True)
class RequestBlocks(Claim):
    """What one request holds: blocks on one tier, a claim, and maybe a move that has not landed.

    room: tokens that it may have on the device without another question, as the device blocks can carry them and the
    request's claim reaches that far. table: the device blocks as a frozen value for plans.
    """

    host: list[int] = field(default_factory=list)
    room: int = 0
    table: tuple[int, ...] = ()
    moving: Direction | None = None


class KVLedger:
    """Which request holds which blocks on which tier, what is claimed, what is in transit.

    A request's blocks lie on one tier, or are in transit between the two. While a move is in transit the request
    cannot be moved again or released; blocks that the move still reads are *fenced*: neither free nor usable until
    `land`. Blocks are handed out in a fixed order, so that a trace repeats exactly.

    Claims form a tree: what a request claims is free for all to take, or lent by another request or an account out of
    what that claims itself.

    device_blocks, host_blocks: pool sizes in blocks. block_size: tokens per block.
    blocks_of: what a request holds, or None; to be read, and changed by the ledger alone.
    """

    def __init__(self, device_blocks: int, host_blocks: int, block_size: int) -> None:
        for name, value, low in (
            ("device_blocks", device_blocks, 1),
            ("host_blocks", host_blocks, 0),
            ("block_size", block_size, 1),
        ):
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        self.block_size = block_size
        self.device_total = device_blocks
        self.host_total = host_blocks
        self.blocks_in_transit = dict.fromkeys(Direction, 0)
        self._device_free: list[int] = []
        self._host_free: list[int] = []
        self._held: dict[Request, RequestBlocks] = {}
        self._accounts: dict[Account, Claim] = {}
        self._root = Claim()
        # Asked for every request of every step: the dictionary answers itself.
        self.blocks_of: Callable[[Request], RequestBlocks | None] = self._held.get
        self.clear()

    # -- questions ----------------------------------------------------------------------------------------

    @property
    def device_free(self) -> int:
        """Device blocks that no request holds and no move reads."""
        return len(self._device_free)

    @property
    def host_free(self) -> int:
        """Host blocks that no request holds and no move reads."""
        return len(self._host_free)

    @property
    def available(self) -> int:
        """Device blocks that nothing claims. Negative where claims exceed the pool."""
        return self.device_total - self._root.lent

    def blocks_for(self, tokens: int) -> int:
        """Blocks that carry `tokens` tokens."""
        return -(-tokens // self.block_size)

    def holders(self) -> Iterator[Request]:
        """Every request that holds anything, in the order in which they began to."""
        return iter(self._held)

    def latest_holders(self) -> Iterator[Request]:
        """The same, the latest first."""
        return reversed(self._held)

    def is_settled(self, request: Request) -> bool:
        """Whether the request holds something and none of it is in transit."""
        held = self._held.get(request)
        return held is not None and held.moving is None

    def slots(self, request: Request) -> tuple[int, ...]:
        """The device blocks of the request, in the order of its tokens: position p lies in
        slots[p // block_size], at p % block_size."""
        return self._held[request].table

    def footprint(self, request: Request) -> int:
        """Device blocks that the request's lender gets back if it gives up all it holds and claims; what it lends stays
        with its guests."""
        held = self._held.get(request)
        return held.size - held.lent if held else 0

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

    def footprint_on_host(self, request: Request) -> int:
        """Host blocks that the request holds."""
        held = self._held.get(request)
        return len(held.host) if held else 0

    @property
    def holder_count(self) -> int:
        """How many requests hold anything."""
        return len(self._held)

    def gives_back_to(self, request: Request, lenders: frozenset[Lender]) -> bool:
        """Whether all of the request's footprint comes back to one of these if it gives that up: a lender between that
        is promised as much as it has keeps it for itself."""
        held = self._held[request]
        claim, blocks = held.lender, held.size - held.lent
        while claim is not None and claim.owner not in lenders:
            if claim.size - claim.promised < blocks:
                return False
            claim = claim.lender
        return True

    def shortfall(self, request: Request, tokens: int) -> int:
        """Device blocks that must become available before the request can hold `tokens` tokens there."""
        held = self._held.get(request)
        if held is None:
            return max(0, self.blocks_for(tokens) - self.available)
        need = self.blocks_for(tokens) - len(held.device)
        return max(0, need - self._unused_in_all(held) - self.available, need - len(self._device_free))

    def shortfall_of_claim(self, request: Request, blocks: int, lender: Lender) -> int:
        """Blocks that must become available before the request can claim `blocks` in all out of `lender`. Negative:
        more than enough are."""
        held = self._held.get(request)
        if held is None:
            return blocks - self.headroom(lender)
        blocks = max(blocks, len(held.device) + held.lent)
        return blocks - self._freed(held, self._claim_of(lender)) - self.headroom(lender)

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        """Free blocks that the request lacks to hold `tokens` tokens on the device, whatever is claimed. Negative: more
        than enough are free."""
        held = self._held.get(request)
        return self.blocks_for(tokens) - (len(held.device) if held else 0) - len(self._device_free)

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The accounts that have blocks to lend."""
        return tuple(self._accounts)

    @property
    def is_moving(self) -> bool:
        """Whether any KV is in transit."""
        return any(self.blocks_in_transit.values())

    # -- holding ------------------------------------------------------------------------------------------

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

    def claim(self, request: Request, blocks: int, *, tokens: int | None = None, lender: Lender = None) -> None:
        """Let the request have `blocks` device blocks in all, out of what `lender` has, for `tokens` tokens at most;
        None: without a limit. The claim that it has ends. Ask `shortfall_of_claim` first."""
        lent_by = self._claim_of(lender)
        held = self._holding(request)
        if held is lent_by or held in lent_by.lenders():
            raise LedgerError(f"request {request.id} claims blocks that it lends itself")
        if held.lender is not lent_by:
            held.join(lent_by)
        held.promised = blocks
        held.resize()
        self._limit(request, held, UNLIMITED if tokens is None else tokens)

    def grow(self, request: Request, tokens: int) -> RequestBlocks:
        """Give the request device blocks for `tokens` tokens in all; ask `shortfall` first."""
        held = self._holding(request)
        missing = self.blocks_for(tokens) - len(held.device)
        if held.moving is Direction.OUT or (held.host and held.moving is None):
            raise LedgerError(f"request {request.id} grows while its KV is not on the device")
        if missing > len(self._device_free):
            raise LedgerError(f"request {request.id} needs {missing} blocks, {len(self._device_free)} are free")
        if missing > 0:
            for _ in range(missing):
                held.device.append(self._device_free.pop())
            self._refresh(request, held)
        return held

    def growth(self, requests: Iterable[Request], steps: int) -> list[int] | None:
        """How many blocks beyond their claims these requests need in each of `steps` steps that compute one more token
        of each. None: more than are available, or a claim does not reach that far, or is lent and has to grow."""
        size, blocks = self.block_size, [0] * steps
        for request in requests:
            held = self._held[request]
            room = (held.size - held.lent) * size - request.planned
            if request.planned + steps > request.claimed or (room < steps and held.lender is not self._root):
                return None
            for step in range(room, steps, size):
                blocks[step] += 1
        return blocks if sum(blocks) <= self.available else None

    def expect(self, request: Request) -> None:
        """Give the request device blocks for its computed tokens, whose KV is on its way from another engine: they are
        fenced until `receive`."""
        held = self.grow(request, request.computed)
        if held.moving is not None:
            raise LedgerError(f"request {request.id} expects KV while its own is in transit")
        held.moving = Direction.IN

    def receive(self, request: Request) -> None:
        """The KV that the request expects is there: lift its fence."""
        held = self._held[request]
        if held.moving is not Direction.IN or held.host:
            raise LedgerError(f"request {request.id} receives KV that it does not expect")
        held.moving = None

    def release(self, request: Request) -> None:
        """Take back everything the request holds and claims; no effect if that is nothing. Its guests stay, and their
        lender is its own."""
        held = self._held.get(request)
        if held is None:
            return
        if held.moving is not None:
            raise LedgerError(f"request {request.id} is released while its KV is in transit")
        del self._held[request]
        held.leave()
        request.claimed = UNLIMITED
        self._device_free.extend(reversed(held.device))
        self._host_free.extend(reversed(held.host))

    def clear(self) -> None:
        """Begin again with nothing held, claimed or in transit: all that lay on either tier is lost."""
        self.blocks_in_transit = dict.fromkeys(Direction, 0)
        # Popped from the end, so the lowest block numbers go first.
        self._device_free = list(range(self.device_total - 1, -1, -1))
        self._host_free = list(range(self.host_total - 1, -1, -1))
        for request in self._held:
            request.claimed = UNLIMITED
        self._held.clear()
        self._accounts.clear()
        self._root = Claim()

    # -- moving -------------------------------------------------------------------------------------------

    def move_out(self, request: Request, *, blocking: bool) -> Move:
        """Begin moving the request's computed KV to the host. Blocks beyond it are freed at once.

        blocking: the copy is taken before the plan's slices run, so the device blocks are free at once;
        otherwise they are fenced until `land`. The claim ends either way: beyond what it holds it has to ask anew, and
        its guests are lent theirs by its lender.
        """
        held = self._held[request]
        blocks = self.blocks_for(request.computed)
        if not self.can_move_out(request):
            raise LedgerError(f"request {request.id} cannot be moved out")
        self._end_claim(request, held)
        source, beyond = held.device[:blocks], held.device[blocks:]
        self._device_free.extend(reversed(beyond))
        held.host = [self._host_free.pop() for _ in range(blocks)]
        held.device = source
        if blocking:
            self._free_device(request, held)
        else:
            self._refresh(request, held)
        return self._begin(held, Move(Direction.OUT, request, tuple(source), tuple(held.host), request.computed))

    def can_move_out(self, request: Request) -> bool:
        """Whether the request's KV is settled on the device and the host has enough free blocks."""
        held = self._held.get(request)
        if held is None or held.moving is not None or held.host or request.in_flight:
            return False
        return 0 < self.blocks_for(request.computed) <= len(self._host_free)

    def move_in(self, request: Request) -> Move:
        """Begin moving the request's KV back to the device. The host blocks are fenced until `land`."""
        held = self._held[request]
        if not self.can_move_in(request):
            raise LedgerError(f"request {request.id} cannot be moved in")
        held.device = [self._device_free.pop() for _ in held.host]
        self._refresh(request, held)
        return self._begin(held, Move(Direction.IN, request, tuple(held.host), tuple(held.device), request.computed))

    def can_move_in(self, request: Request) -> bool:
        """Whether the request's KV is settled on the host and the device has enough blocks that others do not claim."""
        held = self._held.get(request)
        if held is None or held.moving is not None:
            return False
        return 0 < len(held.host) <= self._unused_in_all(held) + self.available

    def land(self, move: Move) -> None:
        """The move has ended well: lift its fence."""
        held = self._end(move)
        if move.direction is Direction.OUT:
            self._free_device(move.request, held)
        else:
            self._free_host(held)

    def fail(self, move: Move) -> bool:
        """The move has ended badly. True: the request's KV is whole, and on the device as before. False: it is lost,
        and the request is to be released."""
        held = self._end(move)
        self._free_host(held)
        return move.direction is Direction.OUT and bool(held.device)

    # -- the proof ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `LedgerError` unless every block on both tiers is in exactly one place, every request's computed
        tokens lie in blocks that it holds, and what is kept for speed agrees with what it is kept from."""
        for tier, total, free in (
            ("device", self.device_total, self._device_free),
            ("host", self.host_total, self._host_free),
        ):
            places = Counter(free)
            for held in self._held.values():
                places.update(getattr(held, tier))
            if places != Counter(range(total)):
                raise LedgerError(f"a {tier} block leaked or doubled")
        self._check_claims()
        for request, held in self._held.items():
            if held.device and held.host and held.moving is None:
                raise LedgerError(f"request {request.id} lies on both tiers")
            if request.computed > (len(held.host) or len(held.device)) * self.block_size:
                raise LedgerError(f"request {request.id} has computed more than its blocks carry")
            if held.table != tuple(held.device) or held.room != self._room(request, held):
                raise LedgerError(f"request {request.id} has a stale block table")
        moving = Counter(dict.fromkeys(Direction, 0))
        for held in self._held.values():
            if held.moving is not None:
                moving[held.moving] += len(held.host)
        if moving != self.blocks_in_transit:
            raise LedgerError(f"{self.blocks_in_transit} blocks are counted as in transit, {dict(moving)} are")

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

    def _holding(self, request: Request) -> RequestBlocks:
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = RequestBlocks(request)
            held.join(self._root)
        return held

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
            freed = claim.size - max(claim.promised, len(claim.device) + claim.lent - freed)
            claim = claim.lender
        return freed

    def _unused_in_all(self, claim: Claim) -> int:
        """Blocks that the claim and its lenders do not use, of those that nothing else claims."""
        unused = 0
        while claim.lender is not None:
            unused += claim.unused
            claim = claim.lender
        return unused

    def _begin(self, held: RequestBlocks, move: Move) -> Move:
        held.moving = move.direction
        self.blocks_in_transit[move.direction] += len(move.source)
        return move

    def _end(self, move: Move) -> RequestBlocks:
        held = self._held[move.request]
        if held.moving is not move.direction:
            raise LedgerError(f"request {move.request.id}: a move ended that was not in transit")
        held.moving = None
        self.blocks_in_transit[move.direction] -= len(move.source)
        return held

    def _free_device(self, request: Request, held: RequestBlocks) -> None:
        self._device_free.extend(reversed(held.device))
        held.device = []
        self._refresh(request, held)
        if held.lender is not self._root:
            held.join(self._root)

    def _free_host(self, held: RequestBlocks) -> None:
        self._host_free.extend(reversed(held.host))
        held.host = []

    def _end_claim(self, request: Request, held: RequestBlocks) -> None:
        held.hand_over()
        held.promised = 0
        if request.claimed != UNLIMITED:
            self._limit(request, held, 0)

    def _limit(self, request: Request, held: RequestBlocks, tokens: int) -> None:
        request.claimed = tokens
        held.room = self._room(request, held)

    def _refresh(self, request: Request, held: RequestBlocks) -> None:
        held.table = tuple(held.device)
        held.room = self._room(request, held)
        held.resize()

    def _room(self, request: Request, held: RequestBlocks) -> int:
        return min(len(held.device) * self.block_size, request.claimed)


def _name(lender: Lender) -> str:
    if lender is None:
        return "the pool"
    return f"request {lender.id}" if isinstance(lender, Request) else f"account {lender.name}"
