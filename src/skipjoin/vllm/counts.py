from __future__ import annotations

from dataclasses import dataclass, field
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
    reservation: Reservation
    device: Count
    room: int = 0
    tokens_before_drop: int = 0
    table: tuple[int, ...] = ()
    cpu: list[int] = field(default_factory=list)
    moving: Direction | None = None

    @property
    def away(self) -> int:
        return len(self.cpu)

    @property
    def is_settled(self) -> bool:
        return self.moving is None


class ManagedPool:
    """Block pool of a `KVCacheManager` with one KV cache group."""

    def __init__(self, manager: Any, block_size: int) -> None:
        self.block_size = block_size
        self._manager = manager
        self._pool = manager.block_pool
        (group,) = manager.coordinator.single_type_managers
        self._blocks: dict[str, list[Any]] = group.req_to_blocks
        self.total = self._pool.num_gpu_blocks - 1  # the null block is never allocated

    @property
    def free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def held(self, request: Request) -> int:
        return len(self._blocks.get(request.sampling.request_id, ()))  # type: ignore[attr-defined]

    def shared(self, request: Request) -> int:
        """Return the number of blocks that the request and others hold."""
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
        return Hit(tokens, sum(block.ref_cnt > 0 for block in blocks.blocks[0])) if tokens else MISS
