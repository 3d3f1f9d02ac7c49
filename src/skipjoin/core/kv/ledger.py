from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.holdings import Holdings
from skipjoin.core.kv.interface import Hit
from skipjoin.core.kv.reservations import Owner
from skipjoin.core.kv.tiers import Tiers
from skipjoin.core.request import UNLIMITED, Request


class KVLedger(Holdings):
    """Ledger of the KV blocks that each request holds and reserves.

    The first blocks of a request are on the device and the rest on the CPU tier. A request with a move in transit
    cannot be moved again or released. Blocks are allocated in a fixed order, so that traces are reproducible. Unless
    swapping `is_exact`, swapped KV is neither cached nor shared.
    """

    def _compose(self) -> None:
        super()._compose()
        self.tiers = Tiers(self, self._transfers, self._shared, is_exact=self._is_exact)

    @property
    def state_blocks(self) -> float:
        return 0.0 if self.states is None else self.states.blocks

    @property
    def is_moving(self) -> bool:
        return any(self.tiers.blocks_in_transit.values())

    @property
    def leaked(self) -> tuple[int, int]:
        device, cpu, held = self.device, self.cpu, self.held.values()
        return (
            device.total - device.free - sum(len(entry.device) - entry.reservation.adopted for entry in held),
            cpu.total - cpu.free - sum(len(entry.cpu) for entry in held) - sum(1 for _ in self._copies()),
        )

    def filled_after(self, request: Request, freed: int) -> int:
        held = self.held.get(request)
        if held is None or self.states is not None:
            return 0
        keep, reservation = self.filled(request), held.reservation
        missing = freed - (reservation.size + reservation.adopted - reservation.nested_blocks - keep)
        if held.sharing.borrowed:  # borrowed blocks without KV stay with their owner
            missing += sum(at >= keep for at in held.sharing.borrowed)
        while keep and missing > 0:
            keep -= 1
            missing -= not self._holders.is_shared(held.device[keep])  # other holders keep a shared block
        return keep

    def lost(self, request: Request, keep: int = 0) -> int:
        held, computed = self.held.get(request), request.progress.computed
        # What it finds follows what it keeps only if it keeps nothing, and it finds no state in the middle of blocks.
        if held is None or keep or self.states is not None or held.sharing.owned or held.sharing.borrowed:
            return computed - self.tokens_in(request, keep)
        shared = min(held.keyed, held.reservation.shared + held.reservation.adopted)
        found = shared + round((held.keyed - shared) * self.cache.survival)
        return max(0, computed - found * self.block_size)

    def shortfall(self, request: Request, tokens: int) -> int:
        held = self.held.get(request)
        if held is None:
            return max(0, self.blocks_for(tokens) - self.available)
        need = self.blocks_for(tokens) - len(held.device)
        if held.sharing.owned:
            need += self._shared.extra(held, tokens)
        unused = self.reservations.unused_in_all(held.reservation)
        return max(0, need - unused - self.available, need - self.device.free)

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        held, need = self.held.get(request), self.blocks_for(tokens) - self.device.free
        if held is None:
            return need
        need -= len(held.device)
        return need + self._shared.extra(held, tokens) if held.sharing.owned else need

    def shortfall_of_reservation(self, request: Request, blocks: int, parent: Owner = None) -> int:
        return self.reservations.shortfall(request, blocks, parent)

    def growth(self, requests: Iterable[Request], steps: int) -> list[int] | None:
        # None also if a nested reservation would have to grow, or if any block is shared bidirectionally.
        if self._shared.of:
            return None
        size, blocks, root = self.block_size, [0] * steps, self.reservations.root
        for request in requests:
            reservation = self.held[request].reservation
            progress = request.progress
            room = (reservation.size + reservation.adopted - reservation.nested_blocks) * size - progress.planned
            is_nested = reservation.parent is not root
            if progress.planned + steps > progress.reserved_tokens or (room < steps and is_nested):
                return None
            for step in range(room, steps, size):
                blocks[step] += 1
        return blocks if sum(blocks) <= self.available else None

    # -- allocation ---------------------------------------------------------------------------------------

    def adopt(self, request: Request) -> Hit:
        hit = self.hit(request)
        if hit.tokens:
            self.cache.adopt(self._hold(request), hit)
            if self.states is not None:
                self.states.snapshots.restore(request, request.keys(hit.tokens)[hit.tokens // self.block_size - 1])
        return hit

    def reserve(self, request: Request, blocks: int, *, tokens: int | None = None, parent: Owner = None) -> None:
        self.reservations.find(parent)  # raises before anything changes
        held = self._hold(request)
        self.reservations.promise(request, blocks, parent)
        request.progress.reserve(UNLIMITED if tokens is None else tokens)
        held.refresh_room()

    def try_grow(self, request: Request, tokens: int) -> bool:
        held = self.held[request]
        if held.swapped_out or not held.is_settled or held.sharing.owned or held.sharing.borrowed:
            return False
        if tokens > request.progress.reserved_tokens or self.shortfall(request, tokens) > 0:
            return False
        self.grow(request, tokens)
        return True

    def drop(self, request: Request, *, keep: int = 0) -> None:
        held = self.held[request]
        if not keep:
            self.release(request)
            self.cache.note_drop(request)
            return
        if held.moving is not None:
            raise LedgerError(f"request {request.id} drops KV while it is in transit")
        self._transfers.detach(held, keep)
        held.tokens_before_drop = request.progress.computed
        self.free_cpu(held)
        self.cut(held, keep)

    def release(self, request: Request) -> None:
        held = self.held.get(request)
        if held is None:
            return
        if held.moving is not None:
            raise LedgerError(f"request {request.id} is released while its KV is in transit")
        self._transfers.detach(held)
        del self.held[request]
        if self.states is not None:
            self.states.release(request)
        self.reservations.close(request)
        request.progress.reserve(UNLIMITED)
        self._give_back(held, held.device)
        self.cpu.put(held.cpu)
        self.cache.retract(request)
        if request.progress.finish_reason is None:
            self.cache.await_prefix(request)

    def clear(self) -> None:
        waiting = list(self.cache.awaited)
        for request in self.held:
            request.progress.reserve(UNLIMITED)
        self._compose()
        for request in waiting:
            self.cache.await_prefix(request)

    def reclaim(self) -> int:
        held = self.held.values()
        lost = self.device.reclaim({block for entry in held for block in entry.device})
        for block in lost:
            self._holders.of.pop(block, None)
        return len(lost) + len(self.cpu.reclaim({*self._copies(), *(block for entry in held for block in entry.cpu)}))

    def _copies(self) -> Iterable[int]:
        return chain(self._shared.copies(), self.cache.cpu.targets)

    # -- consistency check --------------------------------------------------------------------------------

    def check(self) -> None:
        held = self.held.values()
        self.device.check(chain.from_iterable(map(self._holders.counted, held)))
        self.cpu.check(chain(self._copies(), *(entry.cpu for entry in held)))
        self._holders.check(held)
        self._transfers.check()
        self._shared.check()
        self.cache.check()
        self.reservations.check()
        if self.states is not None:
            self.states.check(self.held.keys())
        for entry in held:
            entry.check()
        if any(self.leaked):
            raise LedgerError(f"{self.leaked} blocks are leaked by the count")
