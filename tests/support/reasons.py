"""Checks that the wait reasons of a decision agree with the state of the engine."""

from __future__ import annotations

from skipjoin.core.engine import EngineCore
from skipjoin.core.policy import BatcherWrapper
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.core.waits import WaitReason
from skipjoin.policies.batching import Greedy, TargetForward, Yielding
from skipjoin.policies.packing import Packing

# Reasons of a request behind which others wait for memory.
_OF_MEMORY = frozenset(
    {
        WaitReason.NO_KV,
        WaitReason.BEHIND_MEMORY,
        WaitReason.KV_ON_CPU,
        WaitReason.KV_IN_TRANSIT,
        WaitReason.HELD_BY_ADMISSION,
    }
)

# Reasons of a request that `Packing` may have chosen.
_CHOSEN = _OF_MEMORY | {WaitReason.STEP_TIME, WaitReason.HELD_BY_BATCHER}


class Decision:
    """The latest decision of an engine core: its plan, and the requests that it examined and did not run."""

    def __init__(self, core: EngineCore, plan: StepPlan, evicted: set[Request]) -> None:
        self._core, self._plan, self._evicted = core, plan, evicted
        self.waits = core.scheduler.waits
        self.waiting = [
            request for request in core.requests.values() if request in self.waits and not request.progress.in_flight
        ]
        batcher = core.scheduler.policies.batcher
        while isinstance(batcher, BatcherWrapper):
            batcher = batcher.batcher
        assert isinstance(batcher, Greedy | Yielding | TargetForward | Packing)
        self._batcher = batcher
        self._max_seqs = batcher.max_seqs
        self._max_tokens = batcher.target if isinstance(batcher, TargetForward) else batcher.max_tokens
        self._slots, self._tokens = len(plan.slices), sum(slice_.tokens for slice_ in plan.slices)
        # Requests that have slots and tokens, and lack KV.
        self._without_kv = len(plan.waiting_for_kv)
        if isinstance(batcher, Packing):  # it may choose requests before KV, or the time of other clients, runs short
            ran = {slice_.request for slice_ in plan.slices}
            self._without_kv += len(evicted) + sum(self.waits[request].reason in _CHOSEN for request in self.waiting)
            self._without_kv += sum(
                request.progress.in_flight and request not in ran for request in core.requests.values()
            )

    def is_true(self, request: Request) -> bool:
        """Return whether the reason why a request waits agrees with the state after the decision."""
        held = self._core.kv.blocks_of(request)
        first = set(self._before(request))
        before = [slice_ for slice_ in self._plan.slices if slice_.request in first]
        # `TargetForward` has no maximum for decodes.
        needs_none = request.progress.pending == 1 and isinstance(self._batcher, TargetForward)
        has_tokens = needs_none or sum(slice_.tokens for slice_ in before) < self._max_tokens
        has_room = len(before) < self._max_seqs and has_tokens
        moved = {move.request for move in (*self._plan.blocking, *self._plan.overlapped)}
        match self.waits[request].reason:
            case WaitReason.NO_SLOT:
                return self._slots + self._without_kv >= self._max_seqs
            case WaitReason.TOKEN_BUDGET:
                whole = self._tokens + request.progress.known - request.progress.reached > self._max_tokens
                return whole or self._tokens >= self._max_tokens or self._without_kv > 0
            case WaitReason.HELD_BY_BATCHER | WaitReason.STEP_TIME | WaitReason.HELD_BY_ADMISSION:
                return has_room
            case WaitReason.BEHIND_REAL_TIME:
                return request.is_best_effort
            case WaitReason.KV_ON_CPU:
                return held is not None and len(held.cpu) > 0
            case WaitReason.KV_IN_TRANSIT:
                return request in moved or (held is not None and not held.is_settled)
            case WaitReason.HELD_BY_EVICTION:
                return held is not None or request in self._evicted
            case WaitReason.BEHIND_MEMORY:
                return bool(self._evicted) or any(map(self._lacks_memory, first))  # evictions change ranks
            case WaitReason.GRAMMAR:
                return request.progress.awaits_grammar
        return True

    def _before(self, request: Request) -> list[Request]:
        rank = self._core.scheduler.policies.ordering.rank
        return [other for other in self._core.requests.values() if rank(other) < rank(request)]

    def _lacks_memory(self, request: Request) -> bool:
        is_behind_plans = request.progress.in_flight and all(
            slice_.request is not request for slice_ in self._plan.slices
        )
        waits = request in self.waits and self.waits[request].reason in _OF_MEMORY
        return waits or is_behind_plans
