from __future__ import annotations

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.holdings import Holdings
from skipjoin.core.kv.moves import Copy, joined
from skipjoin.core.kv.request_blocks import RequestBlocks
from skipjoin.core.kv.shared_blocks import SharedBlocks
from skipjoin.core.kv.transfers import Transfers
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Span


class Tiers:
    """Moves of KV between the device and the CPU tier, or from another engine."""

    def __init__(self, kv: Holdings, transfers: Transfers, shared: SharedBlocks, *, is_exact: bool) -> None:
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
            self._kv.free_cpu(held)
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
            self._kv.free_cpu(held, len(move.target))
            return None
        elif move.direction is Direction.OUT:
            keep = len(held.device)
            self._kv.cache.cpu.forget(move.target)
        else:
            keep = held.device.index(move.target[0])
            if move.direction is Direction.IN:  # otherwise the request would hit it again and fail again
                self._kv.cache.cpu.forget(move.source)
        if part is None and move.direction is not Direction.WITHIN:
            self._kv.free_cpu(held)
        return self._lose(held, keep)

    def _lose(self, held: RequestBlocks, keep: int | None = None) -> int | None:
        kept = self._transfers.lose(held, keep)
        return kept if kept is None or self._kv.states is None else 0
