"""The account of KV blocks as the planner and the policies see it, whatever keeps it.

`KVAccounts` are the questions, `Ledger` adds what a plan and its outcome do. Each begins with what every ledger
answers and does. The sections that follow are about what a ledger may lack: the bodies there are those of a ledger
that lacks it, for a class that derives from the Protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import NamedTuple, Protocol

from skipjoin.core.kv.reservations import Account, Lender
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move

_NONE_IN_TRANSIT: Mapping[Direction, int] = dict.fromkeys(Direction, 0)


class Hit(NamedTuple):
    """KV that a request can use: tokens of it, always fewer than are known, and how many of its blocks other requests
    hold. The others take up blocks that were available. leader: the request that is to compute the block after these.
    away: how many of the blocks, the last ones, are on the host."""

    tokens: int
    held: int
    leader: Request | None = None
    away: int = 0


MISS = Hit(0, 0)


class HeldBlocks(Protocol):
    """What one request holds, to be read: one record and no questions, because each request of each step is looked at.

    device: its blocks there, of which only the number is asked. table: the same for plans, as a frozen value; empty
    from a ledger that only counts. room: tokens that it may have on the device without another question. regains:
    tokens that it had before the last ones were dropped, 0 where none were.

    With one tier the rest is empty. host: its blocks there, of which only the number is asked. away: blocks with KV
    that has to come back from the host before the request can run. moving: which way KV of it is in transit. parts:
    moves in transit that save slots in which another request writes.
    """

    @property
    def device(self) -> Sized: ...
    @property
    def table(self) -> tuple[int, ...]: ...
    @property
    def room(self) -> int: ...
    @property
    def regains(self) -> int: ...
    @property
    def host(self) -> Sized: ...
    @property
    def away(self) -> int: ...
    @property
    def moving(self) -> Direction | None: ...
    @property
    def parts(self) -> Sized: ...


class KVAccounts(Protocol):
    """Questions about KV blocks; `KVLedger` answers them here. None of them changes anything.

    block_size: tokens per block.
    """

    # -- of every ledger: blocks on the device, and requests that hold and claim some -----------------------

    @property
    def block_size(self) -> int: ...
    @property
    def device_total(self) -> int: ...

    @property
    def device_free(self) -> int:
        """Device blocks that no request holds and no move reads."""
        ...

    @property
    def available(self) -> int:
        """Device blocks that nothing claims. Negative where claims exceed the pool."""
        ...

    @property
    def holder_count(self) -> int:
        """How many requests hold anything."""
        ...

    def blocks_for(self, tokens: int) -> int:
        """Blocks that carry `tokens` tokens."""
        return -(-tokens // self.block_size)

    def holders(self) -> Iterator[Request]:
        """Every request that holds anything, in the order in which they began to."""
        ...

    def latest_holders(self) -> Iterator[Request]:
        """The same, the latest first."""
        ...

    def holds(self, request: Request) -> bool:
        """Whether the request holds or claims anything."""
        ...

    def blocks_of(self, request: Request, /) -> HeldBlocks | None:
        """What the request holds; None: nothing, and it claims nothing."""
        ...

    def footprint(self, request: Request) -> int:
        """Device blocks that come free if the request gives up all it holds and claims."""
        ...

    def filled(self, request: Request) -> int:
        """Device blocks that hold computed KV of the request: the first ones that it has there."""
        ...

    def filled_after(self, request: Request, given_up: int) -> int:
        """The same once its lender has got so many blocks of its footprint back: what is claimed and not held goes
        first, then blocks without KV, then the last ones with KV."""
        ...

    def tokens_in(self, request: Request, blocks: int) -> int:
        """Computed tokens of the request that its first `blocks` blocks hold."""
        return min(request.computed, blocks * self.block_size)

    def empty_slots(self, request: Request) -> int:
        """Slots of the request's last block with KV that have none."""
        return -request.computed % self.block_size

    def shortfall(self, request: Request, tokens: int) -> int:
        """Device blocks that must become available before the request can hold `tokens` tokens there."""
        ...

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        """Free blocks that the request lacks to hold `tokens` tokens on the device, whatever is claimed. Negative: more
        than enough are free."""
        ...

    def shortfall_of_claim(self, request: Request, blocks: int, lender: Lender) -> int:
        """Blocks that must become available before the request can claim `blocks` in all out of `lender`. Negative:
        more than enough are."""
        ...

    def growth(self, requests: Iterable[Request], steps: int) -> list[int] | None:
        """How many blocks beyond their claims these requests need in each of `steps` steps that compute one more token
        of each. None: that is not known, or they cannot take these steps without another decision."""
        return None

    # -- claims that are lent out of other claims -----------------------------------------------------------

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The accounts that have blocks to lend."""
        return ()

    def lender_of(self, request: Request) -> Lender:
        """What the request's claim is lent out of; None: nothing, or it has none."""
        return None

    def lenders(self, request: Request, lender: Lender) -> frozenset[Lender]:
        """What gets blocks back for a claim of the request that `lender` lends: the request, the lender, what lends it
        its own claim, and so on to None, where blocks are free for all."""
        return frozenset((request, lender))

    def gives_back_to(self, request: Request, lenders: frozenset[Lender]) -> bool:
        """Whether all of the request's footprint comes back to one of these if it gives that up."""
        return True

    def headroom(self, lender: Lender) -> int:
        """Blocks that a new claim can be lent: what the lender does not use, what its lenders do not use, and what is
        available."""
        return self.available

    def unused(self, lender: Request | Account) -> int:
        """Blocks that the lender claims, and neither holds nor lends; 0 if it claims none."""
        return 0

    def unused_without(self, account: Account, request: Request) -> int:
        """Blocks that the account has to lend once it does not lend any to the request."""
        return 0

    # -- a second tier, on the host -------------------------------------------------------------------------

    @property
    def host_total(self) -> int:
        return 0

    @property
    def host_free(self) -> int:
        """Host blocks that no request holds and no move reads."""
        return 0

    @property
    def blocks_in_transit(self) -> Mapping[Direction, int]:
        """How many blocks are, by direction."""
        return _NONE_IN_TRANSIT

    @property
    def is_moving(self) -> bool:
        """Whether any KV is in transit."""
        return False

    def is_settled(self, request: Request) -> bool:
        """Whether the request holds something and none of it is in transit."""
        return self.holds(request)

    def footprint_on_host(self, request: Request) -> int:
        """Host blocks with KV of the request."""
        return 0

    def can_move_out(self, request: Request, *, keep: int = 0, blocking: bool = True) -> bool:
        """Whether the request's KV behind the first `keep` blocks on the device can move to the host now."""
        return False

    def can_move_in(self, request: Request) -> bool:
        """Whether the request's KV on the host can move to the device now, beside what others claim there."""
        return False

    # -- blocks that several requests hold, and KV that is found again ----------------------------------------

    def hit(self, request: Request) -> Hit:
        """What a request that holds nothing finds of its KV: full blocks from the first one on."""
        return MISS

    def shared_within(self, requests: Iterable[Request]) -> int:
        """Device blocks that these requests share with each other alone: no footprint of one has them."""
        return 0

    @property
    def cached_blocks(self) -> int:
        """Free device blocks whose KV can be found."""
        return 0

    @property
    def cached_host_blocks(self) -> int:
        """Free host blocks whose KV can be found."""
        return 0

    @property
    def shared_blocks(self) -> int:
        """Device blocks that more than one request holds."""
        return 0

    # -- blocks that two requests fill from both ends -------------------------------------------------------

    @property
    def has_two_ends(self) -> bool:
        """Whether blocks can be lent: what is overwritten has to come back as it was."""
        return False

    @property
    def lent_blocks(self) -> int:
        """Device blocks that two requests fill from both ends."""
        return 0

    def can_lend(self, owner: Request, borrower: Request) -> bool:
        """Whether the one may lend blocks to the other now."""
        return False

    def in_the_way(self, request: Request, tokens: int) -> Iterable[Request]:
        """The owners of slots that are to be saved before the request has `tokens` tokens."""
        return ()

    def relief(self, request: Request, tokens: int, others: Iterable[Request]) -> int:
        """Return how many device blocks fewer the request needs for `tokens` tokens if the others hold nothing: those
        in place of blocks that it lends them."""
        return 0

    def tokens_there(self, request: Request) -> int:
        """Computed tokens of the request whose KV is on the device."""
        return request.computed

    # -- a pool that is counted beside the account ----------------------------------------------------------

    @property
    def astray(self) -> tuple[int, int]:
        """Blocks of the device and of the host that are neither free nor held, where there should be none; negative:
        more are free or held than there are."""
        return (0, 0)


class Ledger(KVAccounts, Protocol):
    """What plans and their outcomes do to the account; `KVLedger` does it here. Only the scheduler does, and each only
    where the questions allow it: what moves, shares or lends is not called where nothing can."""

    # -- of every ledger ------------------------------------------------------------------------------------

    def claim(self, request: Request, blocks: int, *, tokens: int | None = None, lender: Lender = None) -> None:
        """Let the request have `blocks` device blocks in all, out of what `lender` has, for `tokens` tokens at most
        (`Request.claimed`); None: without a limit. The claim that it has ends. Ask `shortfall_of_claim` first."""
        ...

    def grow(self, request: Request, tokens: int) -> HeldBlocks:
        """Give the request device blocks for `tokens` tokens in all; ask `shortfall` first."""
        ...

    def trim(self, request: Request) -> None:
        """End the request's claim and free its device blocks without KV."""
        ...

    def drop(self, request: Request, *, keep: int = 0) -> None:
        """Give up the request's KV and claim, but for the first `keep` blocks that it has on the device, which are all
        full."""
        ...

    def release(self, request: Request) -> None:
        """Take back everything the request holds and claims; no effect if that is nothing."""
        ...

    def clear(self) -> None:
        """Begin again with nothing held, claimed or in transit: all KV is lost."""
        ...

    # -- claims that are lent out of other claims: if policies have accounts --------------------------------

    def reserve(self, account: Account, blocks: int) -> None:
        """Let the account have that many blocks to lend, or as many as are available."""
        raise NotImplementedError

    def draw(self, account: Account, blocks: int) -> None:
        """Take blocks from what the account has to lend, for good."""
        raise NotImplementedError

    def disband(self, account: Account) -> None:
        """Let the account have nothing to lend, until it is given blocks again."""
        raise NotImplementedError

    # -- KV from another engine: if requests are expected ---------------------------------------------------

    def expect(self, request: Request) -> None:
        """Give the request device blocks for its computed tokens, whose KV is on its way from another engine: they are
        fenced until `receive`."""
        raise NotImplementedError

    def receive(self, request: Request) -> None:
        """The KV that the request expects is there: lift its fence."""
        raise NotImplementedError

    # -- a second tier, on the host -------------------------------------------------------------------------

    def move_out(self, request: Request, *, blocking: bool, keep: int = 0, before: Move | None = None) -> Move | None:
        """Begin moving the request's computed KV to the host, but for the first `keep` blocks that it has on the
        device. Its claim, and blocks beyond the KV, end as with `trim`. None: all of it is saved there.

        blocking: the copy is taken before the plan's slices run, so the device blocks are free at once; otherwise they
        are fenced until `land`. before: a blocking move of the same plan, which carries what follows, and which ended
        with `recall`: the move takes its place.
        """
        raise NotImplementedError

    def recall(self, move: Move) -> None:
        """The blocking move out of a plan that is still being made is not made after all."""
        raise NotImplementedError

    def move_in(self, request: Request) -> Move:
        """Begin moving the request's KV back to the device. The host blocks are fenced until `land`."""
        raise NotImplementedError

    def restore(self, request: Request, tokens: int) -> Sequence[Move]:
        """Begin moving all that the request has on the host back to the device with blocking moves. Ask `shortfall`
        first, which counts what `tokens` tokens need."""
        raise NotImplementedError

    def land(self, move: Move) -> int | None:
        """The move has ended well: lift its fence. Returns what `fail` would, of a move before it."""
        raise NotImplementedError

    def fail(self, move: Move) -> int | None:
        """The move has ended badly. None: no KV is lost, or other moves of the request are in transit whose end tells.
        Otherwise only so many device blocks of the request, the first ones, still hold KV; the rest is to be given up
        with `drop`."""
        raise NotImplementedError

    def keep_cached(self, depth: int) -> Move | None:
        """Begin to copy to the host what the device has cached and is about to lose: an overlapped move, of no request.
        None: nothing is copied now. depth: plans that may be in flight at once."""
        return None

    # -- blocks that several requests hold, and KV that is found again ----------------------------------------

    def adopt(self, request: Request) -> Hit:
        """Let a request that holds nothing hold the blocks that `hit` tells of; returns that."""
        return MISS

    def announce(self, request: Request) -> None:
        """The request is about to compute what it knows and does not hold: it leads those that can use it."""

    def offer(self, request: Request) -> None:
        """Let others find the KV of the request's full blocks, as far as it is computed."""

    def await_prefix(self, request: Request) -> None:
        """The request waits and holds nothing: what it could use stays for longer, until it holds something."""

    def forget_prefix(self, request: Request) -> None:
        """It waits no longer; no effect if it did not."""

    # -- blocks that two requests fill from both ends -------------------------------------------------------

    def lend(self, owner: Request, keep: int, borrower: Request) -> bool:
        """Append the owner's blocks with KV, but for the first `keep`, to those of the borrower. False, and nothing is
        lent: they cannot be saved, or other requests share some of them."""
        return False

    def take_slots(self, request: Request, tokens: int) -> Sequence[Move]:
        """Let the request fill the blocks that it borrows as far as `tokens` tokens reach. Returns the moves that save
        what it overwrites, which are to be carried out before. None of the owners may run meanwhile."""
        return ()

    def take_back(self, request: Request, tokens: int) -> Sequence[Move]:
        """Let the request have `tokens` tokens in the slots of blocks that it lends. Returns the moves that bring the
        KV there, before the slices run."""
        return ()

    # -- a pool that is counted beside the account ----------------------------------------------------------

    def recover(self) -> int:
        """Free all blocks that are astray; how many they were."""
        return 0
