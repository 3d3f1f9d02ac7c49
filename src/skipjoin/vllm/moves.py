from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skipjoin.core.request import Request
from skipjoin.core.step import Direction, StepPlan
from skipjoin.vllm.tier import CountedTier


class KvMoves:
    """Hands copies to the connector, and gives and takes the blocks of vLLM's requests.

    To vLLM, a request on the CPU tier is a preempted one without KV, and one that was swapped in is parked.
    """

    def __init__(self, scheduler: Any, tier: CountedTier, drop: Callable[[Any, float], None]) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._tier = tier
        self._drop = drop

    def begin(self, plan: StepPlan, now: float) -> set[Any]:
        """Start the moves of a plan before vLLM carries it out. Return requests for which vLLM has too few blocks."""
        copies = self._scheduler.connector.copies
        groups = ((copies.blocking, plan.blocking), (copies.overlapped, plan.overlapped))
        for group, moves in groups:
            for move in moves:
                if move.direction is Direction.OUT:
                    group.saves += zip(self._blocks_of(move.request), move.target, strict=False)
        for move in plan.blocking:
            if move.direction is Direction.OUT and move.request is not None:
                self._drop(move.request.sampling, now)
        failed = set()
        for group, moves in groups:
            for move in moves:
                if move.direction is not Direction.IN or move.request is None:
                    continue
                if self._allocate(move.request.sampling, move.tokens):
                    group.loads += zip(move.source, self._blocks_of(move.request), strict=True)
                else:
                    self._tier.fail(move)
                    failed.add(move.request.sampling)
        return failed

    def leaving(self, plan: StepPlan) -> list[Request]:
        return [
            move.request
            for move in plan.overlapped
            if move.direction is Direction.OUT and move.request is not None and self._tier.is_pending(move)
        ]

    def _blocks_of(self, request: Request | None) -> list[int]:
        assert request is not None
        engine_request: Any = request.sampling
        return list(self._manager.get_block_ids(engine_request.request_id)[0])

    def _allocate(self, request: Any, tokens: int) -> bool:
        scheduler = self._scheduler
        # The blocks get into the prefix cache with the next tokens, after their KV is there.
        if self._manager.allocate_slots(request, tokens, delay_cache_blocks=True) is None:
            return False
        request.num_computed_tokens = tokens
        scheduler.waiting.remove_request(request)
        scheduler.kv_holding_waiting.add_request(request)
        return True
