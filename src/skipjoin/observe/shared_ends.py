"""Blocks that two requests fill from both ends, folded from core events (BROS section 5)."""

from __future__ import annotations

from typing import Any

from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move


class SharedEndUse:
    """Shared blocks over time, and what was saved of them and brought back.

    slots: that were saved before another request wrote there (lazy checkpoints). restores: times that a request got
    such slots back, alone or with the rest of its KV.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.restores = 0
        self._saved: set[Request] = set()  # of which slots are saved
        self._lent = 0  # blocks, as of now
        self._lent_block_s = 0.0

    def pass_time(self, seconds: float) -> None:
        """Nothing changed for so long."""
        self._lent_block_s += seconds * self._lent

    def planned(self, lent: int) -> None:
        """So many blocks are shared from now on."""
        self._lent = lent

    def moved(self, move: Move) -> None:
        """A move landed."""
        if move.request is None:
            return
        if move.direction is Direction.OUT and move.spans:
            self.slots += move.tokens
            self._saved.add(move.request)
        elif move.direction is Direction.IN and move.request in self._saved:
            self.restores += 1
            self._saved.remove(move.request)

    def lost(self, request: Request) -> None:
        """The request ended, or its KV is dropped."""
        self._saved.discard(request)

    def close(self) -> None:
        """Forget the requests."""
        self._saved.clear()

    def kv(self, seconds: float, slot_bytes: float) -> dict[str, Any]:
        """Their part of a record. seconds: of the run. slot_bytes: of one token's KV."""
        return {
            "shared_blocks_mean": self._lent_block_s / seconds,
            "checkpointed_slots": self.slots,
            "checkpointed_bytes": round(self.slots * slot_bytes),
            "restores": self.restores,
        }
