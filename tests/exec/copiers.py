"""KV stores with failing, slow and destructive copies, and a copier that completes moves late."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from skipjoin.core.step import Direction, Move
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.transfer import Ended, copy_in_order
from skipjoin.model.kv_cache import PagedKV, SwapPool


class CopyError(Exception):
    """Failure of a copy that a test requests."""


def spoil(rows: torch.Tensor, blocks: Sequence[int] | slice) -> None:
    """Fill blocks with NaN. In int8 blocks the scales become NaN, because a float of all ones is NaN."""
    ones = {torch.uint8: 255, torch.int8: -1}
    rows[blocks if isinstance(blocks, slice) else list(blocks)] = ones.get(rows.dtype, torch.nan)


# Returns whether other requests may still read a block, given the block, whether the move covers only a part of it, and
# whether it lies on the CPU tier.
Keeps = Callable[[int, bool, bool], bool]


def keeps_nothing(block: int, is_part: bool, on_cpu: bool) -> bool:
    return False


class HarshStore(KVStore):
    """KV store that overwrites with NaN whatever no request may read any more.

    Overwritten are the sources of completed moves and the targets of failed ones.
    """

    fails: Callable[[Move], bool] = staticmethod(lambda move: False)
    keeps: Keeps = staticmethod(keeps_nothing)
    delay_s = 0.0

    def copy(self, move: Move) -> None:
        time.sleep(self.delay_s)
        assert self.cpu is not None
        source = self.cpu if move.direction is Direction.IN else self.device
        target = self.cpu if move.direction is Direction.OUT else self.device
        if self.fails(move):
            self._spoil(target, move.target, move)
            if move.state is not None:
                self._states_of(target)[move.state.target] = 255
            raise CopyError(f"request {move.request.id}" if move.request is not None else "the cache")
        super().copy(move)
        if move.request is not None:  # copies of the cache keep their source
            self._spoil(source, move.source, move, self.keeps)
        if move.state is not None:
            self._states_of(source)[move.state.source] = 255

    def _states_of(self, pool: PagedKV | SwapPool) -> torch.Tensor:
        states = self._cpu_states if pool is self.cpu else self.device.states
        assert states is not None
        return states.tensor

    def _spoil(
        self,
        pool: PagedKV | SwapPool,
        blocks: Sequence[int],
        move: Move,
        keeps: Keeps = keeps_nothing,
    ) -> None:
        on_cpu = pool is self.cpu
        if not move.spans:
            spoil(pool.block_view(), [block for block in blocks if not keeps(block, False, on_cpu)])
            return
        assert isinstance(pool, PagedKV)
        for block, (first, count) in zip(blocks, move.spans, strict=True):
            if not keeps(block, True, on_cpu):
                for view in pool.head_views():
                    spoil(view[block].transpose(0, 1), slice(first, first + count))


class LateCopier:
    """Copier that completes each move only after `calls` calls of `poll`.

    That is the latest moment at which the source must be intact and the target untouched.
    """

    def __init__(self, store: KVStore, calls: int) -> None:
        self._store = store
        self._calls = calls
        self._on_way: deque[tuple[int, Move]] = deque()
        self._asked = 0
        self.max_on_way = 0

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        return copy_in_order(self._store, moves)

    def begin(self, moves: Sequence[Move]) -> None:
        self._on_way.extend((self._asked + self._calls, move) for move in moves)
        self.max_on_way = max(self.max_on_way, len(self._on_way))

    def poll(self, timeout_s: float = 0.0) -> Ended:
        self._asked += 1
        ended = Ended([], [])
        while self._on_way and self._on_way[0][0] <= self._asked:
            move = self._on_way.popleft()[1]
            try:
                self._store.copy(move)
            except CopyError:
                ended.failed.append(move)
            else:
                ended.completed.append(move)
        return ended

    def close(self) -> None:
        pass
