"""Interface of the KV ledger to the planner and the policies, which any engine's account of KV blocks can implement."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sized
from typing import NamedTuple, Protocol

from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.request import Request
from skipjoin.core.step import Direction


class Hit(NamedTuple):
    """Prefix-cache hit of a request."""

    tokens: int  # always fewer than the known tokens
    held: int  # number of hit blocks that other requests hold
    leader: Request | None = None  # is about to compute the block after the hit
    swapped_out: int = 0  # number of hit blocks on the CPU tier, the last ones


MISS = Hit(0, 0)


class HeldBlocks(Protocol):
    """Read-only view of the blocks that one request holds.

    Attributes:
        table: Block table for plans; empty for ledgers that only count.
        room: Tokens that it may have on the device without another ledger call.
        swapped_out: Blocks that must be swapped in before it can run.
        is_settled: Whether nothing of it is in transit, slots that another request overwrites included.
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
    def swapped_out(self) -> int: ...
    @property
    def moving(self) -> Direction | None: ...
    @property
    def is_settled(self) -> bool: ...


class Tiered(Protocol):
    """KV that moves between the device and a CPU tier, or arrives from another engine.

    What a move reads or writes is pinned until `complete` or `fail`.
    """

    @property
    def cpu_total(self) -> int:
        """Number of CPU-tier blocks; 0 if KV only arrives from other engines."""

    @property
    def cpu_free(self) -> int: ...
    @property
    def blocks_in_transit(self) -> Mapping[Direction, int]: ...
    def cpu_footprint(self, request: Request) -> int: ...
    def can_move_out(self, request: Request, *, keep: int = 0, blocking: bool = True) -> bool: ...
    def can_move_in(self, request: Request) -> bool: ...


class Cached(Protocol):
    def shared_within(self, requests: Iterable[Request]) -> int:
        """Return how many device blocks only these requests share; no footprint includes them."""

    @property
    def cached_blocks(self) -> int: ...
    @property
    def cached_cpu_blocks(self) -> int: ...
    @property
    def shared_blocks(self) -> int: ...

    @property
    def leased_blocks(self) -> int:
        """Number of free device blocks with leased KV that no waiting request matches."""


class Shared(Protocol):
    """Bidirectional block sharing (BROS section 5), which requires that swapping preserves KV exactly."""

    @property
    def bidirectional_blocks(self) -> int: ...
    def can_share(self, owner: Request, borrower: Request) -> bool: ...

    def in_the_way(self, request: Request, tokens: int) -> Iterable[Request]:
        """Return the owners of slots to save before the request can have `tokens` tokens."""

    def saved_blocks(self, request: Request, tokens: int, others: Iterable[Request]) -> int:
        """Return how many fewer blocks the request needs if `others` hold nothing."""

    def tokens_there(self, request: Request) -> int: ...


class Reserving(Protocol):
    """Nested reservations: a request or an account holds others in blocks that it does not use."""

    @property
    def is_flat(self) -> bool: ...
    def parent_of(self, request: Request) -> Owner: ...

    def sources(self, request: Request, parent: Owner) -> frozenset[Owner]:
        """Return the owners whose freed blocks help a reservation from `parent`."""

    def returns_to(self, request: Request, owners: frozenset[Owner]) -> bool:
        """Return whether evicting the request returns its whole footprint to one of `owners`."""

    def unused(self, owner: Request | Account) -> int: ...

    def with_unused(self, least: int) -> Iterable[tuple[int, int, Request]]:
        """Return the requests that have at least `least` unused blocks, after their number and the request's id."""

    def unused_without(self, account: Account, request: Request) -> int: ...

    def overdrawn(self, account: Account) -> int:
        """Return how many blocks more than reserved for the account are nested in it."""


class Stateful(Protocol):
    """Slots for state that is no KV block, one for each request with blocks."""

    @property
    def free(self) -> int: ...
    def slot_of(self, request: Request) -> int | None: ...


class KVAccounts(Protocol):
    """Queries about KV blocks. Calls change nothing."""

    @property
    def block_size(self) -> int: ...
    @property
    def device_total(self) -> int: ...
    @property
    def device_free(self) -> int: ...

    @property
    def available(self) -> int:
        """Number of unreserved device blocks; negative if the reservations exceed the pool."""

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

    @property
    def state_blocks(self) -> float:
        """Size of a request's state that is no KV, in blocks that move."""
        return 0.0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def tokens_in(self, request: Request, blocks: int) -> int:
        return min(request.progress.computed, blocks * self.block_size)

    def holders(self) -> Collection[Request]: ...
    def blocks_of(self, request: Request, /) -> HeldBlocks | None: ...

    def footprint(self, request: Request, /) -> int:
        """Return how many device blocks evicting the request would free, its reservation included."""

    def filled(self, request: Request) -> int: ...

    def filled_after(self, request: Request, freed: int) -> int:
        """Return what `filled` would be after `freed` blocks of the footprint were freed.

        Reserved blocks go first, then blocks without KV, then the last ones with KV.
        """

    def shortfall(self, request: Request, tokens: int) -> int:
        """Return how many device blocks must become available for `tokens` tokens."""

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        """Return how many free blocks the request lacks for `tokens` tokens, regardless of reservations."""

    def shortfall_of_reservation(self, request: Request, blocks: int, parent: Owner) -> int:
        """Return how many available blocks the request lacks to reserve `blocks`; may be negative."""

    def growth(self, requests: Iterable[Request], steps: int) -> list[int] | None:
        """Return how many unreserved blocks each of the next decode-only steps needs, if that is known."""
        return None

    def hit(self, request: Request, /) -> Hit:
        return MISS

    def lost(self, request: Request, keep: int = 0) -> int:
        """Return how many computed tokens the request is expected to lose if it keeps only its first `keep` blocks.

        Without `keep`, it finds blocks again that other requests hold, and some of the free ones.
        """
        return request.progress.computed - self.tokens_in(request, keep)

    @property
    def leaked(self) -> tuple[int, int]:
        """Number of leaked blocks on the device and on the CPU tier, negative if more are free or held than exist."""
        return (0, 0)
