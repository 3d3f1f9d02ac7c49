from __future__ import annotations

from collections.abc import Iterable, KeysView

from skipjoin.core.kv.interface import MISS, Hit
from skipjoin.core.kv.operations import BlockLedger
from skipjoin.core.kv.reservations import Owner, Reservations
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.vllm.counts import Count, CountedBlocks, GroupedPool, ManagedPool
from skipjoin.vllm.tier import CountedTier


class CountingLedger(BlockLedger):
    """Ledger over a pool, which has the true counts of device blocks.

    Between two calls of `refresh` the ledger counts what the current plan takes and frees, until `settle` adopts what
    the engine did. Blocks without KV stay with their request until it is evicted as a whole. The engine drafts up to
    `drafts` tokens, so that a step needs slots beyond its own tokens.
    """

    block_size = 0
    device_total = device_free = 0
    tiers: CountedTier | None = None

    def __init__(self, pool: ManagedPool, cpu_blocks: int = 0, *, drafts: int = 0, max_len: int = 0) -> None:
        self._pool = pool
        self._drafts, self._max_len = drafts, max_len
        self.tiers = CountedTier(self, cpu_blocks, pool.held) if cpu_blocks else None
        self.block_size, self.device_total = pool.block_size, pool.total
        self._held: dict[Request, CountedBlocks] = {}
        self.blocks_of = self._held.get  # type: ignore[method-assign] # without a call of Python's
        # Counts a shared block once for each holder, and so does the total of the reservations.
        self._held_blocks = 0
        self.device_free = pool.free
        # Caches of this step, in which the engine changes no block.
        self._hits: dict[Request, Hit] = {}
        self._shared_blocks: dict[Request, int] = {}
        self._reservations = Reservations(self.device_free)

    # -- the engine's truth -------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Adopt the engine's number of free blocks, before a plan."""
        self._hits.clear()
        self._shared_blocks.clear()
        self.device_free = self._pool.free
        self._reservations.total = self.device_free + self._held_blocks

    def settle(self, request: Request) -> None:
        """Adopt the number of blocks that the request holds, after the engine ran a plan with it."""
        blocks = self._pool.held(request)
        if blocks:
            self.resize(request, blocks)
        elif (held := self._held.get(request)) is None or not held.cpu:
            self.release(request)

    def follow(self, requests: Iterable[Request]) -> None:
        """Adopt the changes of a plan that the engine ran unchanged."""
        for request in requests if self._drafts else ():
            self.settle(request)

    # -- queries ------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        return self.tiers is not None and any(self.tiers.blocks_in_transit.values())

    @property
    def available(self) -> int:
        return self._reservations.available

    @property
    def reservations(self) -> Reservations:
        return self._reservations

    def holders(self) -> KeysView[Request]:
        return self._held.keys()

    def blocks_of(self, request: Request, /) -> CountedBlocks | None:
        return self._held.get(request)

    def swapped_out(self, request: Request) -> bool:
        held = self._held.get(request)
        return held is not None and bool(held.cpu)

    def footprint(self, request: Request, /) -> int:
        held = self._held.get(request)
        if held is None:
            return 0
        if request.prefix is not None:
            if (shared := self._shared_blocks.get(request)) is None:
                shared = self._shared_blocks[request] = self._shared(request)
            held.reservation.shared = shared
        return held.reservation.alone

    def filled(self, request: Request) -> int:
        held = self._held.get(request)
        return min(len(held.device), self.blocks_for(request.progress.computed)) if held is not None else 0

    def filled_after(self, request: Request, freed: int) -> int:
        return 0

    def shortfall(self, request: Request, tokens: int) -> int:
        held = self._held.get(request)
        need = self._blocks_at(request, self._slots_for(held, tokens))
        if held is None:
            return max(0, need - self.available)
        need -= len(held.device)
        unused = self._reservations.unused_in_all(held.reservation)
        return max(0, need - unused - self.available, need - self.device_free)

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        held = self._held.get(request)
        need = self._blocks_at(request, self._ahead(tokens))
        return need - (len(held.device) if held is not None else 0) - self.device_free

    def shortfall_of_reservation(self, request: Request, blocks: int, parent: Owner) -> int:
        return self._reservations.shortfall(request, blocks, parent)

    def hit(self, request: Request, /) -> Hit:
        if request.prefix is None or request in self._held:
            return MISS
        found = self._hits.get(request)
        if found is None:
            found = self._hits[request] = self._pool.hit(request)
        return found

    # -- operations of a plan -----------------------------------------------------------------------------

    def reserve(self, request: Request, blocks: int, *, tokens: int | None = None, parent: Owner = None) -> None:
        held = self._hold(request)
        self._reservations.promise(request, blocks, parent)
        request.progress.reserve(UNLIMITED if tokens is None else tokens)
        self._set_room(request, held)

    def adopt(self, request: Request) -> Hit:
        hit = self.hit(request)
        if hit.tokens:
            self._hold(request)
            # Blocks of others were not free, and are counted once more.
            self.device_free += hit.held
            self._reservations.total += hit.held
            self.resize(request, *self._adopted(hit.tokens))
        return hit

    def grow(self, request: Request, tokens: int) -> CountedBlocks:
        held = self._hold(request)
        self.resize(request, max(len(held.device), self.blocks_for(self._ahead(tokens))))
        return held

    def try_grow(self, request: Request, tokens: int) -> bool:
        held = self._held[request]
        if held.cpu or held.moving is not None:
            return False
        if tokens > request.progress.reserved_tokens or self.shortfall(request, tokens) > 0:
            return False
        self.grow(request, tokens)
        return True

    def trim(self, request: Request) -> None:
        held = self._held[request]
        held.reservation.hand_over()
        held.reservation.promised = 0
        if request.progress.reserved_tokens != UNLIMITED:
            request.progress.reserve(0)
        self.resize(request, len(held.device), held.slots)

    def cut(self, request: Request) -> None:
        """Free the device blocks of a request that stays on the CPU tier."""
        held, root = self._held[request], self._reservations.root
        shared = self._shared(request)
        self.trim(request)
        held.reservation.shared = 0
        self.device_free -= shared
        self._reservations.total -= shared
        self.resize(request, 0)
        if held.reservation.parent is not root:
            held.reservation.join(root)

    def drop(self, request: Request, *, keep: int = 0) -> None:
        self.release(request)

    def release(self, request: Request) -> None:
        held = self._held.get(request)
        if held is None:
            return
        shared, blocks = self._shared(request), len(held.device)
        if self.tiers is not None:
            self.tiers.release(request)
        del self._held[request]
        self._reservations.close(request)
        request.progress.reserve(UNLIMITED)
        self._held_blocks -= blocks
        self.device_free += blocks - shared
        self._reservations.total -= shared

    def clear(self) -> None:
        for request in list(self._held):
            self.release(request)

    def _hold(self, request: Request) -> CountedBlocks:
        held = self._held.get(request)
        if held is None:
            count = Count()
            held = self._held[request] = CountedBlocks(self._reservations.open(request, count), count)
            request.progress.find(0)
        return held

    def resize(self, request: Request, blocks: int, slots: int | None = None) -> None:
        """Set the number of device blocks, and of tokens that they hold, by default all that fit."""
        held = self._hold(request)
        held.slots = blocks * self.block_size if slots is None else slots
        more = blocks - held.device.blocks
        held.device.blocks = blocks
        self._held_blocks += more
        self.device_free -= more
        held.reservation.resize()
        if held.cpu or held.moving is not None:
            held.room = 0
        else:
            self._set_room(request, held)

    def _set_room(self, request: Request, held: CountedBlocks) -> None:
        slots = held.slots if held.slots >= self._max_len else held.slots - self._drafts
        held.room = min(slots, request.progress.reserved_tokens)

    def _blocks_at(self, request: Request, tokens: int) -> int:
        return self.blocks_for(tokens)

    def _slots_for(self, held: CountedBlocks | None, tokens: int) -> int:
        return self._ahead(tokens)

    def _adopted(self, tokens: int) -> tuple[int, int | None]:
        """Return the arguments of `resize` after a hit of `tokens` tokens."""
        return self.blocks_for(tokens), None

    def _ahead(self, tokens: int) -> int:
        return min(tokens + self._drafts, self._max_len) if self._drafts else tokens

    def _shared(self, request: Request) -> int:
        if request.prefix is None:
            return 0
        if self._pool.held(request):
            return self._pool.shared(request)
        return self._hits.get(request, MISS).held


class GroupedLedger(CountingLedger):
    """Ledger over several KV cache groups, some of which free the blocks that their window has left."""

    def __init__(self, pool: GroupedPool, *, drafts: int = 0, max_len: int = 0) -> None:
        super().__init__(pool, drafts=drafts, max_len=max_len)
        self._groups = pool

    def settle(self, request: Request) -> None:
        if blocks := self._groups.held(request):
            self.resize(request, blocks, self._groups.slots(request))
        else:
            self.release(request)

    def follow(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.settle(request)

    def blocks_for(self, tokens: int) -> int:
        return self._groups.blocks_for(tokens)

    def grow(self, request: Request, tokens: int) -> CountedBlocks:
        held = self._hold(request)
        slots = self._slots_for(held, tokens)
        self.resize(request, self._blocks_at(request, slots), slots)
        return held

    def _blocks_at(self, request: Request, tokens: int) -> int:
        return self._groups.blocks_at(tokens, request.progress.computed)

    def _slots_for(self, held: CountedBlocks | None, tokens: int) -> int:
        return self._ahead(tokens) if held is None else max(self._ahead(tokens), held.slots)

    def _adopted(self, tokens: int) -> tuple[int, int | None]:
        return self._groups.blocks_at(tokens, tokens), tokens
