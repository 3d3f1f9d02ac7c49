from __future__ import annotations

from collections.abc import Mapping

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.request_blocks import RequestBlocks
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move


class Transfers:
    def __init__(self, requests: Mapping[Request, RequestBlocks]) -> None:
        self.blocks = dict.fromkeys(Direction, 0)
        self._requests = requests
        self._detached: set[Move] = set()  # no request depends on them

    def begin(self, held: RequestBlocks, move: Move) -> Move:
        held.transit.direction, held.transit.move = move.direction, move
        return self._count(held, move)

    def begin_aside(self, held: RequestBlocks, move: Move) -> Move:
        held.transit.direction, held.transit.aside = held.transit.direction or move.direction, move
        return self._count(held, move)

    def begin_saving(self, held: RequestBlocks, move: Move, index: int) -> Move:
        held.transit.saves[move] = index
        return self._count(held, move)

    def begin_copy(self, move: Move) -> Move:
        self._detached.add(move)
        self.blocks[move.direction] += len(move.source)
        return move

    def expect(self, held: RequestBlocks) -> None:
        if held.transit.direction is not None:
            raise LedgerError(f"request {held.request.id} expects KV while its own is in transit")
        held.transit.direction = Direction.IN
        held.refresh_room()

    def receive(self, held: RequestBlocks) -> None:
        if held.transit.direction is not Direction.IN or held.transit.move is not None:
            raise LedgerError(f"request {held.request.id} receives KV that it does not expect")
        held.transit.direction = None
        held.refresh_room()

    def end(self, move: Move) -> tuple[RequestBlocks | None, int | None]:
        """Unregister a move; return what its request holds and the block whose slots it saved, if any."""
        held, index = None, None
        if move in self._detached:
            self._detached.remove(move)
        elif move.request is None or (held := self._requests.get(move.request)) is None:
            raise LedgerError("a move of no request ended that was not in transit")
        else:
            index = self._leave(held, move)
            held.refresh_room()
        self.blocks[move.direction] -= len(move.source)
        return held, index

    def detach(self, held: RequestBlocks, keep: int = 0) -> None:
        """Detach moves that save slots of blocks after the first `keep`, whose KV is dropped.

        Their CPU-tier blocks can be reused, because later writes are ordered after these moves.
        """
        saves = held.transit.saves
        for move in [move for move, index in saves.items() if index >= keep]:
            del saves[move]
            self._detached.add(move)
        held.refresh_room()

    def lose(self, held: RequestBlocks, keep: int | None = None) -> int | None:
        """Record that the request lost the KV after its first `keep` device blocks.

        Returns:
            The number of blocks that remain, once no move of the request is in transit.
        """
        transit = held.transit
        lost = [index for index in (keep, transit.lost_from) if index is not None]
        transit.lost_from = min(lost, default=None)
        if transit.lost_from is None or transit.direction is not None:
            return None
        keep, transit.lost_from = transit.lost_from, None
        return min(keep, len(held.device))

    def check(self) -> None:
        moves = list(self._detached)
        for held in self._requests.values():
            transit = held.transit
            if transit.direction is None and not (transit.move or transit.aside or transit.saves):
                continue
            between = [move for move in (transit.move, transit.aside) if move is not None]
            directions: set[Direction | None] = {move.direction for move in between}
            # Without a move, KV may arrive from another engine.
            if transit.direction not in (directions or (None, Direction.IN)):
                raise LedgerError(f"request {held.request.id} has KV in transit in another direction than its moves")
            moves += (*between, *transit.saves)
        counts = dict.fromkeys(Direction, 0)
        for move in moves:
            counts[move.direction] += len(move.source)
        if counts != self.blocks:
            raise LedgerError(f"{self.blocks} blocks are counted as in transit, {counts} are")

    def _count(self, held: RequestBlocks, move: Move) -> Move:
        self.blocks[move.direction] += len(move.source)
        held.refresh_room()
        return move

    def _leave(self, held: RequestBlocks, move: Move) -> int | None:
        transit = held.transit
        if move in transit.saves:
            return transit.saves.pop(move)
        if transit.aside is move:
            transit.aside = None
        elif transit.move is move:
            transit.move = None
        else:
            raise LedgerError(f"request {held.request.id}: a move ended that was not in transit")
        left = transit.move or transit.aside
        transit.direction = left.direction if left is not None else None
        return None
