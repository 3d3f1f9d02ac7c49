"""Interface of the KV ledger to the planner and the policies.

`KVAccounts` has the queries; `Ledger` adds the operations. The sections after the first describe optional features.
Their default bodies are those of a ledger without the feature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import NamedTuple, Protocol

from skipjoin.core.kv.reservations import Account, Lender
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move

_NONE_IN_TRANSIT: Mapping[Direction, int] = dict.fromkeys(Direction, 0)


class Hit(NamedTuple):
    """Prefix-cache hit of a request.

    Attributes:
        tokens: Number of cached tokens, always less than the number of known tokens.
        held: Number of hit blocks that other requests hold. The others are taken from the available blocks.
        leader: Request that is about to compute the block after the hit.
        away: Number of hit blocks on the CPU tier; they are the last ones.
    """

    tokens: int
    held: int
    leader: Request | None = None
    away: int = 0


MISS = Hit(0, 0)


class HeldBlocks(Protocol):
    """Read-only view of the blocks that one request holds.

    It is one record, not a set of queries, because each step reads it for each request. The fields from `host` on are
    empty with a single tier.

    Attributes:
        device: Blocks on the device; only their number is used.
        table: Block table for plans; empty for ledgers that only count.
        room: Tokens that the request may have on the device without another ledger call.
        regains: Tokens that it had before its last ones were dropped; 0 if none were.
        host: Blocks on the CPU tier; only their number is used.
        away: Blocks that must be swapped in before the request can run.
        moving: Direction of its KV in transit.
        parts: Moves in transit that save slots which another request overwrites.
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
    """Queries about KV blocks. Calls change nothing."""

    # -- required: device blocks, their holders and reservations ------------------------------------------

    @property
    def block_size(self) -> int: ...
    @property
    def device_total(self) -> int: ...

    @property
    def device_free(self) -> int:
        """Number of device blocks that no request holds and no move reads."""
        ...

    @property
    def available(self) -> int:
        """Number of unreserved device blocks. Negative if the reservations exceed the pool."""
        ...

    @property
    def holder_count(self) -> int:
        """Number of requests that hold or reserve blocks."""
        ...

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def holders(self) -> Iterator[Request]:
        """Iterate over the requests that hold or reserve blocks, oldest holder first."""
        ...

    def latest_holders(self) -> Iterator[Request]:
        """Iterate over the same requests, newest holder first."""
        ...

    def holds(self, request: Request) -> bool:
        """Return whether the request holds or reserves blocks."""
        ...

    def blocks_of(self, request: Request, /) -> HeldBlocks | None:
        """Return what the request holds, or None if it neither holds nor reserves blocks."""
        ...

    def footprint(self, request: Request) -> int:
        """Return the number of device blocks that evicting the request would free, its reservation included."""
        ...

    def filled(self, request: Request) -> int:
        """Return the number of the request's device blocks with computed KV; they are its first ones."""
        ...

    def filled_after(self, request: Request, given_up: int) -> int:
        """Return what `filled` would be after the request gave up `given_up` blocks of its footprint.

        Reserved blocks that it does not hold go first, then blocks without KV, then the last ones with KV.
        """
        ...

    def tokens_in(self, request: Request, blocks: int) -> int:
        return min(request.computed, blocks * self.block_size)

    def empty_slots(self, request: Request) -> int:
        """Return the number of empty slots in the request's last block with KV."""
        return -request.computed % self.block_size

    def shortfall(self, request: Request, tokens: int) -> int:
        """Return how many device blocks must become available before the request can hold `tokens` tokens."""
        ...

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        """Return how many free blocks the request lacks to hold `tokens` tokens, regardless of reservations.

        The result is negative if more than enough blocks are free.
        """
        ...

    def shortfall_of_claim(self, request: Request, blocks: int, lender: Lender) -> int:
        """Return how many blocks must become available before the request can reserve `blocks` in total from `lender`.

        The result is negative if more than enough blocks are available.
        """
        ...

    def growth(self, requests: Iterable[Request], steps: int) -> list[int] | None:
        """Return how many unreserved blocks each of the next `steps` decode-only steps of these requests needs.

        Returns:
            None if that is unknown, or if the steps need another decision.
        """
        return None

    # -- nested reservations ------------------------------------------------------------------------------

    @property
    def accounts(self) -> tuple[Account, ...]:
        """Accounts that have blocks to lend."""
        return ()

    def lender_of(self, request: Request) -> Lender:
        """Return the parent of the request's reservation; None for the shared pool or without a reservation."""
        return None

    def lenders(self, request: Request, lender: Lender) -> frozenset[Lender]:
        """Return the parties whose freed blocks help a reservation of the request from `lender`.

        They are the request, the lender and the lender's ancestors up to None, the shared pool.
        """
        return frozenset((request, lender))

    def gives_back_to(self, request: Request, lenders: frozenset[Lender]) -> bool:
        """Return whether evicting the request returns its whole footprint to one of `lenders`."""
        return True

    def headroom(self, lender: Lender) -> int:
        """Return how many blocks a new reservation can take from `lender`.

        They are the unused blocks of the lender and its ancestors, and the available ones.
        """
        return self.available

    def unused(self, lender: Request | Account) -> int:
        """Return how many blocks the lender reserves but neither holds nor lends."""
        return 0

    def unused_without(self, account: Account, request: Request) -> int:
        """Return how many blocks the account could lend if it lent none to the request."""
        return 0

    # -- CPU tier -----------------------------------------------------------------------------------------

    @property
    def host_total(self) -> int:
        return 0

    @property
    def host_free(self) -> int:
        """Number of CPU-tier blocks that no request holds and no move reads."""
        return 0

    @property
    def blocks_in_transit(self) -> Mapping[Direction, int]:
        return _NONE_IN_TRANSIT

    @property
    def is_moving(self) -> bool:
        return False

    def is_settled(self, request: Request) -> bool:
        """Return whether the request holds blocks and none of its KV is in transit."""
        return self.holds(request)

    def footprint_on_host(self, request: Request) -> int:
        """Return the number of CPU-tier blocks with KV of the request."""
        return 0

    def can_move_out(self, request: Request, *, keep: int = 0, blocking: bool = True) -> bool:
        """Return whether the request's KV after its first `keep` device blocks can be swapped out now."""
        return False

    def can_move_in(self, request: Request) -> bool:
        """Return whether the request's swapped-out KV fits on the device now, within its own and unreserved blocks."""
        return False

    # -- prefix cache -------------------------------------------------------------------------------------

    def hit(self, request: Request) -> Hit:
        """Return the prefix-cache hit of a request that holds nothing: full blocks from the first one on."""
        return MISS

    def shared_within(self, requests: Iterable[Request]) -> int:
        """Return the number of device blocks shared only among these requests; no single footprint includes them."""
        return 0

    @property
    def cached_blocks(self) -> int:
        """Number of free device blocks in the prefix cache."""
        return 0

    @property
    def cached_host_blocks(self) -> int:
        """Number of free CPU-tier blocks in the prefix cache."""
        return 0

    @property
    def shared_blocks(self) -> int:
        """Number of device blocks that several requests hold."""
        return 0

    # -- bidirectional block sharing (BROS section 5) -----------------------------------------------------

    @property
    def has_two_ends(self) -> bool:
        """True if blocks can be shared bidirectionally, which requires that swapping preserves KV exactly."""
        return False

    @property
    def lent_blocks(self) -> int:
        """Number of bidirectionally shared device blocks."""
        return 0

    def can_lend(self, owner: Request, borrower: Request) -> bool:
        """Return whether `owner` can share blocks with `borrower` now."""
        return False

    def in_the_way(self, request: Request, tokens: int) -> Iterable[Request]:
        """Return the owners of slots that must be saved before the request can have `tokens` tokens."""
        return ()

    def relief(self, request: Request, tokens: int, others: Iterable[Request]) -> int:
        """Return how many fewer device blocks the request needs for `tokens` tokens if `others` hold nothing.

        These blocks would replace blocks that it lends to the others.
        """
        return 0

    def tokens_there(self, request: Request) -> int:
        """Return the number of the request's computed tokens whose KV is on the device."""
        return request.computed

    # -- leak detection -----------------------------------------------------------------------------------

    @property
    def astray(self) -> tuple[int, int]:
        """Number of leaked blocks on the device and on the CPU tier.

        A negative number means that more blocks are free or held than exist.
        """
        return (0, 0)


class Ledger(KVAccounts, Protocol):
    """Operations of plans and their outcomes on the KV ledger.

    Only the scheduler calls them, and only where the queries allow it. Operations of an optional feature are not called
    on a ledger without it.
    """

    # -- required -----------------------------------------------------------------------------------------

    def claim(self, request: Request, blocks: int, *, tokens: int | None = None, lender: Lender = None) -> None:
        """Replace the request's reservation. Check `shortfall_of_claim` first.

        Args:
            blocks: Total number of device blocks that it may have.
            tokens: Token limit of the reservation (`Request.claimed`); None for no limit.
            lender: Parent reservation; None for the shared pool.
        """
        ...

    def grow(self, request: Request, tokens: int) -> HeldBlocks:
        """Allocate device blocks for `tokens` tokens in total. Check `shortfall` first."""
        ...

    def trim(self, request: Request) -> None:
        """Cancel the request's reservation and free its device blocks without KV."""
        ...

    def drop(self, request: Request, *, keep: int = 0) -> None:
        """Drop the request's KV and reservation, except its first `keep` device blocks, which must be full."""
        ...

    def release(self, request: Request) -> None:
        """Free everything the request holds and reserves; no effect if it has nothing."""
        ...

    def clear(self) -> None:
        """Reset the ledger: nothing is held, reserved or in transit, and all KV is lost."""
        ...

    # -- nested reservations, if policies have accounts ---------------------------------------------------

    def reserve(self, account: Account, blocks: int) -> None:
        """Set the number of blocks that the account can lend, limited to what is available."""
        raise NotImplementedError

    def draw(self, account: Account, blocks: int) -> None:
        """Remove unused blocks from the account permanently."""
        raise NotImplementedError

    def disband(self, account: Account) -> None:
        """Leave the account without blocks to lend until the next `reserve`."""
        raise NotImplementedError

    # -- KV from another engine, if requests are expected -------------------------------------------------

    def expect(self, request: Request) -> None:
        """Allocate device blocks for the request's computed tokens, whose KV arrives from another engine.

        The blocks are fenced until `receive`.
        """
        raise NotImplementedError

    def receive(self, request: Request) -> None:
        """Lift the fence of a request whose expected KV has arrived."""
        raise NotImplementedError

    # -- CPU tier -----------------------------------------------------------------------------------------

    def move_out(self, request: Request, *, blocking: bool, keep: int = 0, before: Move | None = None) -> Move | None:
        """Start swapping out the request's computed KV after its first `keep` device blocks, and trim the request.

        Args:
            blocking: If True, the copy precedes the plan's slices, and the device blocks are free at once. Otherwise
                they are fenced until `land`.
            before: Recalled blocking move of the same plan for the blocks that follow; the new move includes it.

        Returns:
            The move, or None if the CPU tier already has a copy of everything.
        """
        raise NotImplementedError

    def recall(self, move: Move) -> None:
        """Cancel a blocking swap-out of the plan that is being built."""
        raise NotImplementedError

    def move_in(self, request: Request) -> Move:
        """Start swapping in the request's KV. The CPU-tier blocks are fenced until `land`."""
        raise NotImplementedError

    def restore(self, request: Request, tokens: int) -> Sequence[Move]:
        """Start blocking moves that swap in all of the request's KV. Check `shortfall` for `tokens` tokens first."""
        raise NotImplementedError

    def land(self, move: Move) -> int | None:
        """Lift the fence of a completed move.

        Returns:
            The deferred result of an earlier `fail` of the same request, else None.
        """
        raise NotImplementedError

    def fail(self, move: Move) -> int | None:
        """Handle a failed move.

        Returns:
            The number of the request's first device blocks that still hold KV; the rest must be dropped. None if no KV
                is lost, or while other moves of the request are in transit.
        """
        raise NotImplementedError

    def keep_cached(self, depth: int) -> Move | None:
        """Start an overlapped copy to the CPU tier of cached device blocks that are about to be reused.

        Args:
            depth: Maximum number of plans in flight.

        Returns:
            A move without a request, or None if nothing is copied now.
        """
        return None

    # -- prefix cache -------------------------------------------------------------------------------------

    def adopt(self, request: Request) -> Hit:
        """Give a request that holds nothing the blocks of its prefix-cache hit, and return the hit."""
        return MISS

    def announce(self, request: Request) -> None:
        """Register the request as the leader of the blocks that it is about to compute."""

    def offer(self, request: Request) -> None:
        """Add the full computed blocks of the request to the prefix cache."""

    def await_prefix(self, request: Request) -> None:
        """Prefer to keep the cached blocks that this waiting request could use, until it holds blocks."""

    def forget_prefix(self, request: Request) -> None:
        """Undo `await_prefix`; no effect if it was not called."""

    # -- bidirectional block sharing (BROS section 5) -----------------------------------------------------

    def lend(self, owner: Request, keep: int, borrower: Request) -> bool:
        """Append the owner's blocks with KV, except the first `keep`, to the blocks of the borrower.

        Returns:
            False, without any change, if the blocks cannot be saved or if other requests share some of them.
        """
        return False

    def take_slots(self, request: Request, tokens: int) -> Sequence[Move]:
        """Let the request fill its borrowed blocks up to `tokens` tokens. The owners must not run meanwhile.

        Returns:
            Moves that save what is overwritten; they must precede the writes.
        """
        return ()

    def take_back(self, request: Request, tokens: int) -> Sequence[Move]:
        """Give the request slots for `tokens` tokens in blocks that it lends.

        Returns:
            Moves that bring its KV there; they must precede the slices.
        """
        return ()

    # -- leak detection -----------------------------------------------------------------------------------

    def recover(self) -> int:
        """Free leaked blocks and return their number."""
        return 0
