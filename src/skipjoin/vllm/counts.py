from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from skipjoin.core.kv.interface import MISS, Hit
from skipjoin.core.kv.reservations import Reservation
from skipjoin.core.request import Request
from skipjoin.core.step import Direction


class Count:
    """Number of blocks, without their identities."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks = 0

    def __len__(self) -> int:
        return self.blocks


@dataclass(eq=False, slots=True)
class CountedBlocks:
    """Blocks of one request for `slots` tokens, regardless of its reservation."""

    reservation: Reservation
    device: Count
    room: int = 0
    slots: int = 0
    tokens_before_drop: int = 0
    table: tuple[int, ...] = ()
    cpu: list[int] = field(default_factory=list)
    moving: Direction | None = None

    @property
    def swapped_out(self) -> int:
        return len(self.cpu)

    @property
    def is_settled(self) -> bool:
        return self.moving is None


class ManagedPool:
    """Block pool of a `KVCacheManager` with one KV cache group, which keeps all blocks of a request."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._groups: tuple[Any, ...] = tuple(manager.coordinator.single_type_managers)
        group = self._groups[0]
        self.block_size: int = group.block_size
        self._blocks: dict[str, list[Any]] = group.req_to_blocks
        self.total = self._pool.num_gpu_blocks - 1  # the null block is never allocated

    @property
    def free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def held(self, request: Request) -> int:
        return len(self._blocks.get(request.sampling.request_id, ()))  # type: ignore[attr-defined]

    def shared(self, request: Request) -> int:
        return sum(block.ref_cnt > 1 for block in self._blocks.get(request.sampling.request_id, ()))  # type: ignore[attr-defined]

    def hit(self, request: Request) -> Hit:
        manager = self._manager
        # The planner asks often while a request waits. vLLM's metrics count its own lookup when it runs the request.
        logs, manager.log_stats = manager.log_stats, False
        try:
            # Releases differ in what follows the number of tokens.
            blocks, tokens, *_ = manager.get_computed_blocks(request.sampling)
        finally:
            manager.log_stats = logs
        return Hit(tokens, sum(map(self._count_held, blocks.blocks))) if tokens else MISS

    def _count_held(self, blocks: Iterable[Any]) -> int:
        return sum(block.ref_cnt > 0 for block in blocks)


class GroupedPool(ManagedPool):
    """Block pool with several KV cache groups, or with one that frees blocks which its window has left.

    Each group of layers has its own blocks for the same tokens. The null block replaces freed ones: at the beginning,
    and in groups of recurrent layers, whose blocks are states, anywhere.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        # What a block holds on average, if no group has freed any.
        self.block_size = max(1, min(group.block_size for group in self._groups) // len(self._groups))
        self._null = self._pool.null_block
        self._recurrent = [type(group.kv_cache_spec).__name__ == "MambaSpec" for group in self._groups]
        self._caps = [_cap(group) for group in self._groups]

    def blocks_for(self, tokens: int) -> int:
        """Return the maximum blocks of a request that fills these tokens chunk by chunk."""
        sizes = (-(-tokens // group.block_size) for group in self._groups)
        return sum(map(min, sizes, self._caps))

    def blocks_at(self, tokens: int, computed: int) -> int:
        """Return the blocks of a request with slots for `tokens` tokens, of which `computed` are committed."""
        return sum(
            min(
                -(-tokens // group.block_size) - max(0, group.get_num_skipped_tokens(computed)) // group.block_size,
                cap if is_recurrent else math.inf,
            )
            for group, cap, is_recurrent in zip(self._groups, self._caps, self._recurrent, strict=True)
        )

    def held(self, request: Request) -> int:
        return sum(
            sum(block is not self._null for block in blocks) if is_recurrent else len(blocks) - self._freed(blocks)
            for is_recurrent, blocks in zip(self._recurrent, self._tables(request), strict=True)
        )

    def slots(self, request: Request) -> int:
        tables = zip(self._groups, self._tables(request), strict=True)
        return int(min(group.block_size * len(blocks) for group, blocks in tables))

    def shared(self, request: Request) -> int:
        null = self._null
        return sum(
            block.ref_cnt > 1 and block is not null
            for is_recurrent, blocks in zip(self._recurrent, self._tables(request), strict=True)
            for block in islice(blocks, 0 if is_recurrent else self._freed(blocks), None)
        )

    def _tables(self, request: Request) -> Iterator[list[Any]]:
        name = request.sampling.request_id  # type: ignore[attr-defined]
        return (group.req_to_blocks.get(name, ()) for group in self._groups)

    def _freed(self, blocks: Sequence[Any]) -> int:
        null = self._null
        return bisect_left(blocks, True, key=lambda block: block is not null)

    def _count_held(self, blocks: Iterable[Any]) -> int:
        null = self._null
        return sum(block is not null and block.ref_cnt > 0 for block in blocks)


def frees(group: Any) -> bool:
    return bool(group.get_num_skipped_tokens(1 << 40))


def _cap(group: Any) -> float:
    spec = group.kv_cache_spec
    if type(spec).__name__ == "MambaSpec":  # its last state, the next one, and snapshots
        return 2 + getattr(spec, "num_prefill_checkpoint_blocks", 0)
    # vLLM's bound of what a group holds while a prompt fills it. Releases before 0.30 call it private.
    names = ("max_admission_blocks_per_request", "_max_admission_blocks_per_request")
    caps = (getattr(group, name, None) for name in names)
    return next((cap for cap in caps if cap is not None), math.inf)
