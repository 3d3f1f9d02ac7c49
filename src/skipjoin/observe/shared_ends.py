from __future__ import annotations

from typing import Any

from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move


class SharedEndUse:
    """Statistics of bidirectional blocks and their checkpoints."""

    def __init__(self) -> None:
        self.slots = 0
        self.restores = 0
        self._saved: set[Request] = set()  # requests with checkpointed slots
        self.lent = 0  # current number of blocks
        self._lent_block_s = 0.0

    def pass_time(self, seconds: float) -> None:
        self._lent_block_s += seconds * self.lent

    def moved(self, move: Move) -> None:
        if move.request is None:
            return
        if move.direction is Direction.OUT and move.spans:
            self.slots += move.tokens
            self._saved.add(move.request)
        elif move.direction is Direction.IN and move.request in self._saved:
            self.restores += 1
            self._saved.remove(move.request)

    def lost(self, request: Request) -> None:
        self._saved.discard(request)

    def close(self) -> None:
        self._saved.clear()

    def kv(self, seconds: float, slot_bytes: float) -> dict[str, Any]:
        return {
            "shared_blocks_mean": self._lent_block_s / seconds,
            "checkpointed_slots": self.slots,
            "checkpointed_bytes": round(self.slots * slot_bytes),
            "restores": self.restores,
        }
