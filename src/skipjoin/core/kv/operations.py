"""Operations of plans on KV blocks. Policies import `interface` only, which changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from skipjoin.core.kv.interface import MISS, Cached, HeldBlocks, Hit, KVAccounts, Reserving, Shared, Stateful, Tiered
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.request import ProgramId, Request
from skipjoin.core.step import Move, Slice, StatePlan, StepPlan


class TierOperations(Tiered, Protocol):
    def move_out(self, request: Request, *, blocking: bool, keep: int = 0, before: Move | None = None) -> Move | None:
        """Start swapping out the KV after the first `keep` device blocks, and trim the request.

        Args:
            blocking: Whether the copy precedes the plan's slices. The device blocks are free at once then.
            before: Recalled blocking move of the same plan for the blocks that follow, which the new move includes.

        Returns:
            None if the CPU tier already has a copy of everything.
        """

    def recall(self, move: Move) -> None: ...
    def move_in(self, request: Request) -> Move: ...

    def restore(self, request: Request, tokens: int) -> Sequence[Move]:
        """Start blocking moves that swap in all KV, if `shortfall` is 0."""

    def complete(self, move: Move) -> int | None:
        """Unpin the blocks of a completed move, and return the deferred result of an earlier `fail` of the request."""

    def fail(self, move: Move) -> int | None:
        """Handle a failed move.

        Returns:
            The number of first device blocks that still hold KV. None if no KV is lost, or while other moves of the
            request are in transit.
        """

    def keep_cached(self, depth: int) -> Move | None:
        """Start an overlapped copy to the CPU tier of cached blocks that are reused next."""

    def expect(self, request: Request) -> None: ...
    def receive(self, request: Request) -> None: ...


class CacheOperations(Cached, Protocol):
    def announce(self, request: Request) -> None: ...
    def offer(self, request: Request, /) -> None: ...

    def await_prefix(self, request: Request) -> None:
        """Prefer to keep the cached blocks that this waiting request could use."""

    def forget_prefix(self, request: Request) -> None: ...

    def lease(self, program: ProgramId, request: Request, until: float) -> None:
        """Prefer to keep the KV of a program's finished call, in place of that of an earlier call.

        Its blocks are free, but are reused after those that no program has.
        """

    def end_leases(self, now: float) -> None: ...


class SharingOperations(Shared, Protocol):
    def share(self, owner: Request, keep: int, borrower: Request) -> bool:
        """Append the owner's blocks with KV, except the first `keep`, to the blocks of the borrower.

        Returns:
            False if the blocks cannot be saved or other requests share some of them.
        """

    def take_slots(self, request: Request, tokens: int) -> Sequence[Move]:
        """Let the request fill its borrowed blocks up to `tokens` tokens, while the owners do not run.

        Returns:
            Moves that save what is overwritten; they must precede the writes.
        """

    def take_back(self, request: Request, tokens: int) -> Sequence[Move]:
        """Give the request slots for `tokens` tokens in blocks that it shares, by moves that precede its slices."""


class ReservationOperations(Reserving, Protocol):
    def fund(self, account: Account, blocks: int) -> None:
        """Set how many blocks the account can give to nested reservations, as far as available."""

    def draw(self, account: Account, blocks: int) -> None: ...

    def empty_accounts(self) -> None:
        """Leave all accounts empty until the next `fund`; the shared pool takes over their loans."""


class StateOperations(Stateful, Protocol):
    def plan(self, slices: Sequence[Slice], block_size: int) -> StatePlan: ...

    def settle(self, plan: StepPlan, block_size: int, void: Collection[Request]) -> None:
        """Let hits use the snapshots of a committed plan, except those of the requests `void`."""


class BlockLedger(KVAccounts, Protocol):
    """Operations of plans and their outcomes, which only the scheduler calls, where the queries allow them."""

    @property
    def tiers(self) -> TierOperations | None:
        return None

    @property
    def cache(self) -> CacheOperations | None:
        return None

    @property
    def sharing(self) -> SharingOperations | None:
        return None

    @property
    def reservations(self) -> ReservationOperations | None:
        return None

    @property
    def states(self) -> StateOperations | None:
        return None

    def reserve(self, request: Request, blocks: int, *, tokens: int | None = None, parent: Owner = None) -> None:
        """Replace the request's reservation by one as in `Allocation`. Check `shortfall_of_reservation` first."""

    def adopt(self, request: Request) -> Hit:
        return MISS

    def grow(self, request: Request, tokens: int) -> HeldBlocks:
        """Allocate device blocks for `tokens` tokens in total. Check `shortfall` first."""

    def try_grow(self, request: Request, tokens: int) -> bool:
        """Call `grow` for a holder if nothing else is needed: no eviction, reservation, move or slots of others.

        Returns:
            False if nothing has changed.
        """

    def trim(self, request: Request) -> None:
        """Cancel the reservation and free the device blocks without KV."""

    def drop(self, request: Request, *, keep: int = 0) -> None:
        """Drop the KV and the reservation, except the first `keep` device blocks, which are full."""

    def release(self, request: Request) -> None: ...
    def clear(self) -> None: ...

    def reclaim(self) -> int:
        return 0
