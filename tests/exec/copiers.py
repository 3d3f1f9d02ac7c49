"""Stores whose copies fail, take long and spoil what they leave behind, and a copier that lands moves late."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from skipjoin.core.step import Direction, Move
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.transfer import Ended, copy_in_order
from skipjoin.model.kv_cache import PagedKV, QuantizedKV


class CopyError(Exception):
    """A copy that fails because the test wants it to."""


def spoil(rows: torch.Tensor, blocks: Sequence[int] | slice) -> None:
    """Fill blocks with NaN. Of codes, the scales are NaN then: so is a bfloat16 of ones."""
    rows[blocks if isinstance(blocks, slice) else list(blocks)] = 255 if rows.dtype == torch.uint8 else torch.nan


# Says of a block whether others may still read it. The second argument: of the slots that a request has in it. The
# third one: it is on the host.
Keeps = Callable[[int, bool, bool], bool]


def keeps_nothing(block: int, is_part: bool, on_host: bool) -> bool:
    return False


class HarshStore(KVStore):
    """Fills with NaN whatever nobody may read any more: what a copy has left, and what a failed one should have
    written.

    fails: which moves do. delay_s: how long each copy takes at least. keeps: see `Keeps`.
    """

    fails: Callable[[Move], bool] = staticmethod(lambda move: False)
    keeps: Keeps = staticmethod(keeps_nothing)
    delay_s = 0.0

    def copy(self, move: Move) -> None:
        time.sleep(self.delay_s)
        assert self.host is not None
        source = self.host if move.direction is Direction.IN else self.device
        target = self.host if move.direction is Direction.OUT else self.device
        if self.fails(move):
            self._spoil(target, move.target, move)
            raise CopyError(f"request {move.request.id}" if move.request is not None else "the cache")
        super().copy(move)
        if move.request is not None:  # else the source stays where it is
            self._spoil(source, move.source, move, self.keeps)

    def _spoil(
        self,
        pool: PagedKV | QuantizedKV,
        blocks: Sequence[int],
        move: Move,
        keeps: Keeps = keeps_nothing,
    ) -> None:
        """What the move concerns of these blocks."""
        on_host = pool is self.host
        if not move.spans:
            spoil(pool.block_view(), [block for block in blocks if not keeps(block, False, on_host)])
            return
        assert isinstance(pool, PagedKV)
        for block, (first, count) in zip(blocks, move.spans, strict=True):
            if not keeps(block, True, on_host):
                spoil(pool.head_view()[block].transpose(0, 1), slice(first, first + count))


class LateCopier:
    """Copies each move when it has been asked `calls` times for what landed since the move began, and not before: the
    latest moment at which its source must still be there, and its target still untouched.

    most: moves that were on their way at once.
    """

    def __init__(self, store: KVStore, calls: int) -> None:
        self._store = store
        self._calls = calls
        self._on_way: deque[tuple[int, Move]] = deque()
        self._asked = 0
        self.most = 0

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        return copy_in_order(self._store, moves)

    def begin(self, moves: Sequence[Move]) -> None:
        self._on_way.extend((self._asked + self._calls, move) for move in moves)
        self.most = max(self.most, len(self._on_way))

    def landed(self, timeout_s: float = 0.0) -> Ended:
        self._asked += 1
        ended = Ended([], [])
        while self._on_way and self._on_way[0][0] <= self._asked:
            move = self._on_way.popleft()[1]
            try:
                self._store.copy(move)
            except CopyError:
                ended.failed.append(move)
            else:
                ended.landed.append(move)
        return ended

    def close(self) -> None:
        pass
