"""Interface of the KV ledger to the planner and the policies, which any engine's account of KV blocks can implement.

A ledger returns its capabilities `Tiered`, `Cached`, `Shared`, `Reserving` and `Stateful`, or None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import NamedTuple, Protocol

from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move


class Hit(NamedTuple):
    """Prefix-cache hit of a request.

    Attributes:
        tokens: Number of cached tokens, always less than the number of known tokens.
        held: Number of hit blocks that other requests hold.
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

    The fields from `cpu` on are constant with a single tier.

    Attributes:
        device: Blocks on the device. Only the numbers of `device` and `cpu` blocks are used.
        table: Block table for plans; empty for ledgers that only count.
        room: Tokens that the request may have on the device without another ledger call; 0 unless all its KV is there.
        tokens_before_drop: Tokens that it had before its last ones were dropped; 0 if none were.
        away: Blocks that must be swapped in before the request can run.
        is_settled: Whether none of its KV is in transit, including saves of slots that another request overwrites.
    """

    @property
    def device(self) -> Sized: ...
    @property
    def table(self) -> tuple[int, ...]: ...
    @property
    def room(self) -> int: ...
    @property
    def tokens_before_drop(self) -> int: ...
    @property
    def cpu(self) -> Sized: ...
    @property
    def away(self) -> int: ...
    @property
    def moving(self) -> Direction | None: ...
    @property
    def is_settled(self) -> bool: ...


class Tiered(Protocol):
    """KV that moves between the device and a CPU tier, or arrives from another engine.

    Moves are in transit until `land` or `fail`. Until then, what they read or write is pinned.
    """

    @property
    def cpu_total(self) -> int:
        """Number of CPU-tier blocks; 0 if KV only arrives from other engines."""

    @property
    def cpu_free(self) -> int:
        """Number of CPU-tier blocks that no request holds and no move reads."""

    @property
    def blocks_in_transit(self) -> Mapping[Direction, int]: ...

    def cpu_footprint(self, request: Request) -> int:
        """Return the number of blocks with KV of the request that must be swapped in before it runs."""

    def can_move_out(self, request: Request, *, keep: int = 0, blocking: bool = True) -> bool:
        """Return whether the KV after the first `keep` device blocks can be swapped out now."""

    def can_move_in(self, request: Request) -> bool:
        """Return whether the swapped-out KV fits on the device now, within the request's own and unreserved blocks."""

    def move_out(self, request: Request, *, blocking: bool, keep: int = 0, before: Move | None = None) -> Move | None:
        """Start swapping out the KV after the first `keep` device blocks, and trim the request.

        Args:
            blocking: If True, the copy precedes the plan's slices, and the device blocks are free at once.
            before: Recalled blocking move of the same plan for the blocks that follow; the new move includes it.

        Returns:
            The move, or None if the CPU tier already has a copy of everything.
        """

    def recall(self, move: Move) -> None:
        """Cancel a blocking swap-out of the unfinished plan, because another one replaces it or its KV is dropped."""

    def move_in(self, request: Request) -> Move:
        """Start swapping in all of the request's KV."""

    def restore(self, request: Request, tokens: int) -> Sequence[Move]:
        """Start blocking moves that swap in all KV. Check `shortfall` for `tokens` tokens first."""

    def land(self, move: Move) -> int | None:
        """Unpin the blocks of a completed move.

        Returns:
            The deferred result of an earlier `fail` of the same request, else None.
        """

    def fail(self, move: Move) -> int | None:
        """Handle a failed move.

        Returns:
            The number of first device blocks that still hold KV; the rest must be dropped. None if no KV is lost, or
            while other moves of the request are in transit.
        """

    def keep_cached(self, depth: int) -> Move | None:
        """Start an overlapped copy to the CPU tier of cached device blocks that are about to be reused."""

    def expect(self, request: Request) -> None:
        """Allocate and pin device blocks for the computed tokens, whose KV arrives from another engine."""

    def receive(self, request: Request) -> None:
        """Unpin the KV that has arrived."""


class Cached(Protocol):
    """Prefix cache. The scheduler reports computed blocks, waiting requests and running leaders."""

    def announce(self, request: Request) -> None:
        """Register the request as the leader of the blocks that it is about to compute."""

    def offer(self, request: Request, /) -> None:
        """Add the full computed blocks of the request to the cache."""

    def await_prefix(self, request: Request) -> None:
        """Prefer to keep the cached blocks that this waiting request could use, until it holds blocks."""

    def forget_prefix(self, request: Request) -> None:
        """Undo `await_prefix`; no effect if it was not called."""

    def shared_within(self, requests: Iterable[Request]) -> int:
        """Return the number of device blocks shared only among these requests; no single footprint includes them."""

    @property
    def cached_blocks(self) -> int: ...

    @property
    def cached_cpu_blocks(self) -> int: ...

    @property
    def shared_blocks(self) -> int:
        """Number of device blocks that several requests hold."""


class Shared(Protocol):
    """Bidirectional block sharing (BROS section 5), which requires that swapping preserves KV exactly."""

    @property
    def lent_blocks(self) -> int:
        """Number of bidirectionally shared device blocks."""

    def can_lend(self, owner: Request, borrower: Request) -> bool:
        """Return whether `owner` can share blocks with `borrower` now."""

    def lend(self, owner: Request, keep: int, borrower: Request) -> bool:
        """Append the owner's blocks with KV, except the first `keep`, to the blocks of the borrower.

        Returns:
            False, without any change, if the blocks cannot be saved or if other requests share some of them.
        """

    def in_the_way(self, request: Request, tokens: int) -> Iterable[Request]:
        """Return the owners of slots that must be saved before the request can have `tokens` tokens."""

    def saved_blocks(self, request: Request, tokens: int, others: Iterable[Request]) -> int:
        """Return how many fewer device blocks the request needs for `tokens` tokens if `others` hold nothing."""

    def tokens_there(self, request: Request) -> int:
        """Return the number of the request's computed tokens whose KV is on the device."""

    def take_slots(self, request: Request, tokens: int) -> Sequence[Move]:
        """Let the request fill its borrowed blocks up to `tokens` tokens. The owners must not run meanwhile.

        Returns:
            Moves that save what is overwritten; they must precede the writes.
        """

    def take_back(self, request: Request, tokens: int) -> Sequence[Move]:
        """Give the request slots for `tokens` tokens in blocks that it lends.

        Returns:
            Moves that bring its KV there; they must precede the slices.
        """


class Reserving(Protocol):
    """Nested reservations: a request or an account lends blocks that it reserves and does not use."""

    @property
    def is_flat(self) -> bool:
        """Whether no reservation is nested."""
        ...

    def parent_of(self, request: Request) -> Owner:
        """Return the parent reservation; None for the shared pool or without a reservation."""

    def sources(self, request: Request, parent: Owner) -> frozenset[Owner]:
        """Return the owners whose freed blocks help a reservation of the request from `parent`."""

    def returns_to(self, request: Request, owners: frozenset[Owner]) -> bool:
        """Return whether evicting the request returns its whole footprint to one of `owners`."""

    def unused(self, owner: Request | Account) -> int:
        """Return how many blocks the owner reserves but neither holds nor lends."""

    def unused_without(self, account: Account, request: Request) -> int:
        """Return how many blocks the account could lend if it lent none to the request."""

    def fund(self, account: Account, blocks: int) -> None:
        """Set the number of blocks that the account can lend, limited to what is available."""

    def draw(self, account: Account, blocks: int) -> None:
        """Remove unused blocks from the account permanently."""

    def empty_accounts(self) -> None:
        """Leave all accounts empty until the next `fund`. The shared pool takes over their loans."""


class Stateful(Protocol):
    """Slots for state that is no KV block. A request has one while it holds blocks on either tier."""

    @property
    def free(self) -> int: ...


class KVAccounts(Protocol):
    """Queries about KV blocks. Calls change nothing."""

    @property
    def block_size(self) -> int: ...
    @property
    def device_total(self) -> int: ...

    @property
    def device_free(self) -> int:
        """Number of device blocks that no request holds and no move reads."""

    @property
    def available(self) -> int:
        """Number of unreserved device blocks. Negative if the reservations exceed the pool."""

    @property
    def is_moving(self) -> bool:
        return False

    @property
    def tiers(self) -> Tiered | None:
        return None

    @property
    def cache(self) -> Cached | None:
        return None

    @property
    def sharing(self) -> Shared | None:
        return None

    @property
    def reservations(self) -> Reserving | None:
        return None

    @property
    def states(self) -> Stateful | None:
        return None

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def tokens_in(self, request: Request, blocks: int) -> int:
        return min(request.progress.computed, blocks * self.block_size)

    def holders(self) -> Collection[Request]:
        """Return the requests that hold or reserve blocks, oldest holder first."""

    def blocks_of(self, request: Request, /) -> HeldBlocks | None:
        """Return what the request holds, or None if it neither holds nor reserves blocks."""

    def footprint(self, request: Request, /) -> int:
        """Return the number of device blocks that evicting the request would free, its reservation included."""

    def filled(self, request: Request) -> int:
        """Return the number of the request's first device blocks with computed KV."""

    def filled_after(self, request: Request, freed: int) -> int:
        """Return what `filled` would be after `freed` blocks of the footprint were freed.

        Reserved blocks that the request does not hold go first, then blocks without KV, then the last ones with KV.
        """

    def shortfall(self, request: Request, tokens: int) -> int:
        """Return how many device blocks must become available before the request can hold `tokens` tokens."""

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        """Return how many free blocks the request lacks for `tokens` tokens, regardless of reservations."""

    def shortfall_of_reservation(self, request: Request, blocks: int, parent: Owner) -> int:
        """Return how many available blocks the request lacks to reserve `blocks` in total. May be negative."""

    def growth(self, requests: Iterable[Request], steps: int) -> list[int] | None:
        """Return how many unreserved blocks each of the next `steps` decode-only steps needs.

        Returns:
            None if that is unknown, or if the steps need another decision.
        """
        return None

    def hit(self, request: Request, /) -> Hit:
        """Return the hit of a request that holds nothing: full blocks from the first one on."""
        return MISS

    @property
    def leaked(self) -> tuple[int, int]:
        """Number of leaked blocks on the device and on the CPU tier.

        A negative number means that more blocks are free or held than exist.
        """
        return (0, 0)


class BlockLedger(KVAccounts, Protocol):
    """Operations of plans and their outcomes. Only the scheduler calls them, and only where the queries allow it."""

    def reserve(self, request: Request, blocks: int, *, tokens: int | None = None, parent: Owner = None) -> None:
        """Replace the request's reservation. Check `shortfall_of_reservation` first.

        Args:
            blocks: Total number of device blocks that it may have.
            tokens: Token limit of the reservation (`Progress.reserved_tokens`); None for no limit.
            parent: Parent reservation; None for the shared pool, and always without `Reserving`.
        """

    def adopt(self, request: Request) -> Hit:
        """Give a request that holds nothing the blocks of its prefix-cache hit."""
        return MISS

    def grow(self, request: Request, tokens: int) -> HeldBlocks:
        """Allocate device blocks for `tokens` tokens in total. Check `shortfall` first."""

    def trim(self, request: Request) -> None:
        """Cancel the reservation and free the device blocks without KV."""

    def drop(self, request: Request, *, keep: int = 0) -> None:
        """Drop the KV and the reservation, except the first `keep` device blocks, which must be full."""

    def release(self, request: Request) -> None:
        """Free everything the request holds and reserves, if anything."""

    def clear(self) -> None:
        """Drop all KV, blocks, reservations and moves."""

    def reclaim(self) -> int:
        return 0
