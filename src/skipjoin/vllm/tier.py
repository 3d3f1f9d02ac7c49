from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from skipjoin.core.kv.block_pool import BlockPool, LedgerError
from skipjoin.core.kv.operations import TierOperations
from skipjoin.core.kv.reservations import Reservations
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move
from skipjoin.vllm.counts import CountedBlocks


class DeviceBlocks(Protocol):
    @property
    def device_free(self) -> int: ...
    @property
    def available(self) -> int: ...
    @property
    def reservations(self) -> Reservations: ...

    def blocks_of(self, request: Request, /) -> CountedBlocks | None: ...
    def filled(self, request: Request) -> int: ...
    def trim(self, request: Request) -> None: ...
    def cut(self, request: Request) -> None: ...
    def resize(self, request: Request, blocks: int) -> None: ...


class CountedTier(TierOperations):
    """CPU tier whose requests move as a whole.

    Device blocks have no numbers here, so both sides of a `Move` name the blocks of the CPU tier. `allocated` returns a
    request's device blocks.
    """

    cpu_total = 0

    def __init__(self, ledger: DeviceBlocks, total: int, allocated: Callable[[Request], int]) -> None:
        self.cpu_total = total
        self._ledger = ledger
        self._allocated = allocated
        self._cpu = BlockPool(total)
        self._moves: dict[Request, Move] = {}
        self._counts = dict.fromkeys(Direction, 0)

    @property
    def cpu_free(self) -> int:
        return self._cpu.free

    @property
    def blocks_in_transit(self) -> Mapping[Direction, int]:
        return self._counts

    def cpu_footprint(self, request: Request) -> int:
        held = self._ledger.blocks_of(request)
        return held.swapped_out if held is not None else 0

    def can_move_out(self, request: Request, *, keep: int = 0, blocking: bool = True) -> bool:
        held, filled = self._ledger.blocks_of(request), self._ledger.filled(request)
        if held is None or held.moving is not None or request.progress.in_flight:
            return False
        # In the plan that adopts a prefix, the engine has not given its blocks to the request yet.
        return not keep and 0 < filled <= min(self._cpu.free, self._allocated(request))

    def can_move_in(self, request: Request) -> bool:
        held = self._ledger.blocks_of(request)
        if held is None or held.moving is not None or not held.cpu:
            return False
        unused = self._ledger.reservations.unused_in_all(held.reservation)
        return len(held.cpu) <= min(unused + self._ledger.available, self._ledger.device_free)

    def move_out(self, request: Request, *, blocking: bool, keep: int = 0, before: Move | None = None) -> Move:
        ledger, held = self._ledger, self._ledger.blocks_of(request)
        if held is None or not self.can_move_out(request, keep=keep):
            raise LedgerError(f"request {request.id} cannot be moved out")
        held.cpu = self._cpu.take(ledger.filled(request))
        move = self._begin(Direction.OUT, request, held.cpu)
        ledger.trim(request)
        if blocking:
            ledger.cut(request)
        return move

    def move_in(self, request: Request) -> Move:
        held = self._ledger.blocks_of(request)
        if held is None or not self.can_move_in(request):
            raise LedgerError(f"request {request.id} cannot be moved in")
        move = self._begin(Direction.IN, request, held.cpu)
        self._ledger.resize(request, len(held.cpu))
        return move

    def restore(self, request: Request, tokens: int) -> list[Move]:
        held = self._ledger.blocks_of(request)
        return [self.move_in(request)] if held is not None and held.cpu else []

    def complete(self, move: Move) -> int | None:
        if not self.is_pending(move):
            return None  # its request was released meanwhile
        request = self._end(move)
        held = self._ledger.blocks_of(request)
        assert held is not None
        if move.direction is Direction.IN:
            self._cpu.put(held.cpu)
            held.cpu = []
            self._ledger.resize(request, len(held.device))
        else:
            self._ledger.cut(request)
        return None

    def fail(self, move: Move) -> int | None:
        """Take back a swap-in for which the engine found no blocks. The KV stays on the CPU tier."""
        if self.is_pending(move):
            self._ledger.cut(self._end(move))
        return None

    def recall(self, move: Move) -> None:
        raise LedgerError("only a part of a request's KV is recalled, and requests move as a whole")

    def keep_cached(self, depth: int) -> Move | None:
        return None  # cached blocks belong to the engine

    def expect(self, request: Request) -> None:
        raise LedgerError("KV of other engines is not received here")

    receive = expect

    def is_pending(self, move: Move) -> bool:
        return move.request is not None and self._moves.get(move.request) is move

    def is_moving(self, request: Request | None) -> bool:
        return request in self._moves

    def release(self, request: Request) -> None:
        """Free the request's CPU-tier blocks.

        Copies run in the order of their plans, so one in transit may still use them.
        """
        if (move := self._moves.get(request)) is not None:
            self._end(move)
        held = self._ledger.blocks_of(request)
        if held is not None:
            self._cpu.put(held.cpu)
            held.cpu = []

    def _begin(self, direction: Direction, request: Request, blocks: list[int]) -> Move:
        move = Move(direction, request, tuple(blocks), tuple(blocks), request.progress.computed)
        self._moves[request] = move
        self._counts[direction] += len(blocks)
        held = self._ledger.blocks_of(request)
        assert held is not None
        held.moving = direction
        return move

    def _end(self, move: Move) -> Request:
        request = move.request
        assert request is not None
        del self._moves[request]
        self._counts[move.direction] -= len(move.source)
        held = self._ledger.blocks_of(request)
        assert held is not None
        held.moving = None
        return request
