from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from skipjoin.core.kv.block_pool import BlockPool, LedgerError
from skipjoin.core.kv.interface import Hit
from skipjoin.core.kv.moves import Copy, joined
from skipjoin.core.kv.prefix_cache import PrefixCache
from skipjoin.core.kv.request_blocks import Holders, RequestBlocks
from skipjoin.core.kv.reservations import Owner, Reservations
from skipjoin.core.kv.shared_blocks import SharedBlocks
from skipjoin.core.kv.states import StateSlots
from skipjoin.core.kv.transfers import Transfers
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.step import Direction, Move, Span, StateSizes


class KVLedger:
    """Ledger of the KV blocks that each request holds and reserves.

    The first blocks of a request are on the device and the rest on the CPU tier. A request with a move in transit
    cannot be moved again or released. Blocks are allocated in a fixed order, so that traces are reproducible.

    Args:
        is_exact: Whether swapping preserves KV exactly. Otherwise swapped KV is neither cached nor shared.
        states: Slots for state that is no KV block.
    """

    def __init__(
        self,
        device_blocks: int,
        cpu_blocks: int,
        block_size: int,
        *,
        is_exact: bool = True,
        states: StateSizes | None = None,
    ) -> None:
        bounds = ("device_blocks", device_blocks, 1), ("cpu_blocks", cpu_blocks, 0), ("block_size", block_size, 1)
        for name, value, low in bounds:
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        self.device_total, self.block_size = device_blocks, block_size
        self._cpu_total, self._is_exact, self._states = cpu_blocks, is_exact, states
        self._compose()

    def _compose(self) -> None:
        size, held = self.block_size, dict[Request, RequestBlocks]()
        self.held = held
        self.device, self.cpu = device, cpu = BlockPool(self.device_total), BlockPool(self._cpu_total)
        self._holders = holders = Holders()
        self._transfers = transfers = Transfers(held)
        self._shared = SharedBlocks(held, device, cpu, holders, transfers, block_size=size, hold=self._hold)
        self.sharing = self._shared if self._cpu_total and self._is_exact else None
        self.states = StateSlots(self._states) if self._states is not None else None
        snapshots = self.states.snapshots if self.states is not None else None
        self.cache = PrefixCache(held, device, cpu, holders, size, is_exact=self._is_exact, snapshots=snapshots)
        self.reservations = Reservations(self.device_total)
        self.tiers = Tiers(self, transfers, self._shared, is_exact=self._is_exact)
        # Called for many requests in every step, so bind the methods of the parts directly.
        self.blocks_of: Callable[[Request], RequestBlocks | None] = held.get
        self.footprint: Callable[[Request], int] = self.reservations.footprint
        self.hit: Callable[[Request], Hit] = self.cache.hit

    @property
    def device_free(self) -> int:
        return self.device.free

    @property
    def available(self) -> int:
        return self.reservations.available

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

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def tokens_in(self, request: Request, blocks: int) -> int:
        return min(request.progress.computed, blocks * self.block_size)

    def holders(self) -> Collection[Request]:
        return self.held.keys()

    def filled(self, request: Request) -> int:
        held = self.held.get(request)
        return min(len(held.device), self.blocks_for(request.progress.computed)) if held else 0

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

    def has_slot(self, request: Request) -> bool:
        """Return whether the request's state is on the device, or could be."""
        return self.states is None or self.states.slot_of(request) is not None or self.states.free > 0

    def reserve(self, request: Request, blocks: int, *, tokens: int | None = None, parent: Owner = None) -> None:
        self.reservations.find(parent)  # raises before anything changes
        held = self._hold(request)
        self.reservations.promise(request, blocks, parent)
        request.progress.reserve(UNLIMITED if tokens is None else tokens)
        held.refresh_room()

    def grow(self, request: Request, tokens: int) -> RequestBlocks:
        held = self.held.get(request) or self._hold(request)
        missing = self.blocks_for(tokens) - len(held.device)
        if held.moving is Direction.OUT or (held.swapped_out and held.moving is None):
            raise LedgerError(f"request {request.id} grows while its KV is not on the device")
        if missing > self.device.free:
            raise LedgerError(f"request {request.id} needs {missing} blocks, {self.device.free} are free")
        if missing > 0:
            held.device += self.device.take(missing)
            held.refresh()
        return held

    def try_grow(self, request: Request, tokens: int) -> bool:
        held = self.held[request]
        if held.swapped_out or not held.is_settled or held.sharing.owned or held.sharing.borrowed:
            return False
        if tokens > request.progress.reserved_tokens or self.shortfall(request, tokens) > 0:
            return False
        self.grow(request, tokens)
        return True

    def trim(self, request: Request) -> None:
        self.cut(self.held[request], self.filled(request))

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
        self.tiers.free_cpu(held)
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

    def _hold(self, request: Request) -> RequestBlocks:
        held = self.held.get(request)
        if held is None:
            if self.states is not None:
                self.states.reserve(request)
                self.states.snapshots.share(request, self.cache.found(request) * self.block_size)
            device: list[int] = []
            reservation = self.reservations.open(request, device)
            held = self.held[request] = RequestBlocks(request, self.block_size, device, reservation)
            if request.prefix is not None:
                self.cache.forget_prefix(request)
                request.progress.find(0)
        return held

    def cut(self, held: RequestBlocks, keep: int) -> None:
        reservation, request = held.reservation, held.request
        reservation.hand_over()
        reservation.promised = 0
        if request.progress.reserved_tokens != UNLIMITED:
            request.progress.reserve(0)
        gone = held.device[keep:]
        del held.device[keep:]
        held.keyed = min(held.keyed, keep)
        self._give_back(held, gone)
        held.refresh()
        if not keep and reservation.parent is not self.reservations.root:
            reservation.join(self.reservations.root)

    def _give_back(self, held: RequestBlocks, blocks: Sequence[int]) -> None:
        if self._holders.of or self._shared.of:
            remove = self._shared.remove if self._shared.of else self._holders.remove
            blocks = [block for block in blocks if not remove(block, held)]
        self.device.put(blocks)

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


class Tiers:
    """Moves of KV between the device and the CPU tier, or from another engine.

    Blocks that a move reads are *pinned* until `complete`: neither free nor usable.
    """

    def __init__(self, kv: KVLedger, transfers: Transfers, shared: SharedBlocks, *, is_exact: bool) -> None:
        self._kv = kv
        self._transfers = transfers
        self._shared = shared
        self._is_exact = is_exact
        self.cpu_total = kv.cpu.total
        self.blocks_in_transit = transfers.blocks

    @property
    def cpu_free(self) -> int:
        return self._kv.cpu.free

    def cpu_footprint(self, request: Request) -> int:
        held = self._kv.held.get(request)
        return held.swapped_out if held else 0

    def expect(self, request: Request) -> None:
        self._transfers.expect(self._kv.grow(request, request.progress.computed))

    def receive(self, request: Request) -> None:
        self._transfers.receive(self._kv.held[request])

    def can_move_out(self, request: Request, *, keep: int = 0, blocking: bool = True) -> bool:
        # Shared blocks leave with blocking moves only.
        held, states = self._kv.held.get(request), self._kv.states
        if held is None or held.moving is not None or request.progress.in_flight:
            return False
        if states is not None and not states.cpu_free:
            return False
        if held.sharing.owned and not blocking:
            return False
        moved = self._kv.filled(request) - keep
        return 0 < moved <= self._kv.cpu.free + sum(index >= keep for index in held.sharing.owned)

    def can_move_in(self, request: Request) -> bool:
        held = self._kv.held.get(request)
        if held is None or held.moving is not None or held.sharing.overwritten or not self._kv.has_slot(request):
            return False
        return 0 < len(held.cpu) <= self._kv.reservations.unused_in_all(held.reservation) + self._kv.available

    def move_out(self, request: Request, *, blocking: bool, keep: int = 0, before: Move | None = None) -> Move | None:
        held = self._kv.held[request]
        if not self.can_move_out(request, keep=keep):
            raise LedgerError(f"request {request.id} cannot be moved out")
        self._kv.trim(request)
        move = self._shared.move_out(held, keep) if held.sharing.owned else self._out_of(held, keep)
        if blocking:
            self._kv.cut(held, keep)
        if move is not None and before is not None:
            move = joined(move, before, self._kv.block_size)
        move = move or before
        return self._begin(held, move, blocking=blocking) if move is not None else None

    def _begin(self, held: RequestBlocks, move: Move, *, blocking: bool = True) -> Move:
        states = self._kv.states
        return self._transfers.begin(held, move if states is None else states.begin(move, blocking=blocking))

    def _out_of(self, held: RequestBlocks, keep: int) -> Move:
        request, source = held.request, held.device[keep:]
        target = self._kv.cpu.take(len(source))
        tokens = self._kv.tokens_in(request, len(held.device)) - self._kv.tokens_in(request, keep)
        held.cpu[:0] = target
        return Move(Direction.OUT, request, tuple(source), tuple(target), tokens)

    def recall(self, move: Move) -> None:
        self.complete(move)
        self._kv.cache.cpu.forget(move.target)

    def move_in(self, request: Request) -> Move:
        held = self._kv.held[request]
        if not self.can_move_in(request):
            raise LedgerError(f"request {request.id} cannot be moved in")
        tokens = request.progress.computed - self._kv.tokens_in(request, len(held.device))
        target = self._kv.device.take(len(held.cpu))
        held.device += target
        held.refresh()
        return self._begin(held, Move(Direction.IN, request, tuple(held.cpu), tuple(target), tokens))

    def restore(self, request: Request, tokens: int) -> list[Move]:
        # Its slots in blocks that a borrower has overwritten go to other blocks.
        held, take_back = self._kv.held[request], self._shared.take_back
        if not held.sharing.overwritten:
            back = [self.move_in(request)] if held.cpu else []
            return [*take_back(request, tokens), *back]
        copies = list[Copy]()
        if held.cpu:  # one move carries both
            size, first = self._kv.block_size, len(held.device)
            target = self._kv.device.take(len(held.cpu))
            copies = [
                (here, there, Span(size - (filled := self._shared.filled_slots(held, first + place)), filled))
                for place, (here, there) in enumerate(zip(held.cpu, target, strict=True))
            ]
            held.device += target
        return take_back(request, tokens, copies)

    def keep_cached(self, depth: int) -> Move | None:
        move = self._kv.cache.cpu.begin(depth)
        return self._transfers.begin_copy(move) if move is not None else None

    def complete(self, move: Move) -> int | None:
        held, part = self._transfers.end(move)
        if held is None:
            if move.request is None:
                self._kv.cache.cpu.end(is_complete=True)
            return None
        if self._kv.states is not None:
            self._kv.states.end(move, is_complete=True)
        if move.direction is Direction.IN:
            self.free_cpu(held)
            held.is_private = held.is_private or not self._is_exact
            if held.is_private and self._kv.states is not None:
                self._kv.states.snapshots.exclude(held.request)
        elif part is None and move.direction is Direction.OUT:
            if held.holds_source(move):
                self._kv.cut(held, len(held.device) - len(move.source))
            if not move.spans:
                self._kv.cache.offer_swapped(held, move)
        return self._lose(held)

    def fail(self, move: Move) -> int | None:
        held, part = self._transfers.end(move)
        if held is None:
            if move.request is None:
                self._kv.cache.cpu.end(is_complete=False)
            return None
        if self._kv.states is not None:
            self._kv.states.end(move, is_complete=False)
        if part is not None:
            keep = min(part, len(held.device))
        elif move.direction is Direction.OUT and held.holds_source(move):
            self.free_cpu(held, len(move.target))
            return None
        elif move.direction is Direction.OUT:
            keep = len(held.device)
            self._kv.cache.cpu.forget(move.target)
        else:
            keep = held.device.index(move.target[0])
            if move.direction is Direction.IN:  # otherwise the request would hit it again and fail again
                self._kv.cache.cpu.forget(move.source)
        if part is None and move.direction is not Direction.WITHIN:
            self.free_cpu(held)
        return self._lose(held, keep)

    def _lose(self, held: RequestBlocks, keep: int | None = None) -> int | None:
        kept = self._transfers.lose(held, keep)
        return kept if kept is None or self._kv.states is None else 0

    def free_cpu(self, held: RequestBlocks, blocks: int | None = None) -> None:
        self._kv.cpu.put(held.cpu[:blocks])
        del held.cpu[:blocks]
        held.refresh_room()
