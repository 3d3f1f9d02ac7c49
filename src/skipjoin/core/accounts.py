"""What policies may ask of the account of KV blocks, whatever keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from skipjoin.core.claims import Account, Lender
from skipjoin.core.request import Request
from skipjoin.core.step import Direction


class KVAccounts(Protocol):
    """Questions about KV blocks on both tiers; `KVLedger` answers them here. None of them changes anything.

    block_size: tokens per block. blocks_in_transit: by direction.
    """

    @property
    def block_size(self) -> int: ...
    @property
    def blocks_in_transit(self) -> Mapping[Direction, int]: ...
    @property
    def device_total(self) -> int: ...
    @property
    def device_free(self) -> int: ...
    @property
    def host_total(self) -> int: ...
    @property
    def host_free(self) -> int: ...

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
        ...

    def holders(self) -> Iterator[Request]:
        """Every request that holds anything, in the order in which they began to."""
        ...

    def latest_holders(self) -> Iterator[Request]:
        """The same, the latest first."""
        ...

    def holds(self, request: Request) -> bool:
        """Whether the request holds or claims anything."""
        ...

    def footprint(self, request: Request) -> int:
        """Device blocks that come free if the request gives up all it holds and claims."""
        ...

    def footprint_on_host(self, request: Request) -> int:
        """Host blocks with KV of the request."""
        ...

    def filled(self, request: Request) -> int:
        """Device blocks that hold computed KV of the request: the first ones that it has there."""
        ...

    def filled_after(self, request: Request, given_up: int) -> int:
        """The same once its lender has got so many blocks of its footprint back."""
        ...

    def tokens_in(self, request: Request, blocks: int) -> int:
        """Computed tokens of the request that its first `blocks` blocks hold."""
        ...

    def empty_slots(self, request: Request) -> int:
        """Slots of the request's last block with KV that have none."""
        ...

    def lender_of(self, request: Request) -> Lender:
        """What the request's claim is lent out of; None: nothing, or it has none."""
        ...

    def unused(self, lender: Request | Account) -> int:
        """Blocks that the lender claims, and neither holds nor lends; 0 if it claims none."""
        ...

    def shortfall_of_claim(self, request: Request, blocks: int, lender: Lender) -> int:
        """Blocks that must become available before the request can claim `blocks` in all out of `lender`. Negative:
        more than enough are."""
        ...
