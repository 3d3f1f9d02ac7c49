from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.exec.base import RankError, RankMemoryError
from skipjoin.exec.worker import memory_rank, out_of_memory

# Losses without progress after which a request may be dropped. This is more than machines that fail one after the
# other, and less than the default of max_restarts, after which the engine ends with all requests.
_LOSSES = 3


class RankLosses:
    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Request, tuple[int, int]] = WeakKeyDictionary()

    def blame(self, plans: Sequence[StepPlan], error: RankError) -> tuple[Request, str] | None:
        """Choose a request to drop: the largest if memory ran out, else the latest in `_LOSSES` losses."""
        slices = [slice_ for plan in plans for slice_ in plan.slices if slice_.request.progress.finish_reason is None]
        if isinstance(error, RankMemoryError) and slices:
            largest = max(slices, key=memory_rank)
            return largest.request, out_of_memory(largest, error)
        counts = {request: self._count(request) for request in {slice_.request for slice_ in slices}}
        accused = [request for request, losses in counts.items() if losses >= _LOSSES]
        if not accused:
            return None
        latest = max(accused, key=lambda request: (request.arrival, request.id))
        return latest, f"ranks ended {counts[latest]} times while they ran this request, which is not tried again"

    def _count(self, request: Request) -> int:
        tokens, losses = self._counts.get(request, (-1, 0))
        losses = losses + 1 if tokens == len(request.progress.output) else 1
        self._counts[request] = len(request.progress.output), losses
        return losses
