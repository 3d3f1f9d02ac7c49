from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, PAUSE_S, Move, StageTime, StepPlan, StepResult, StepShape


def never(move: Move) -> bool:
    return False


def none(request: Request) -> int:
    return 0


def exactly() -> float:
    return 1.0


def position_as_token(request: Request, position: int) -> int:
    return position


def stage_shares(stages: int | Sequence[float]) -> tuple[float, ...]:
    if isinstance(stages, int):
        if stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        stages = (1.0,) * stages
    if not stages or not all(0 < share < math.inf for share in stages):
        raise ValueError(f"stages must be a number or shares above 0, got {stages}")
    return tuple(share / sum(stages) for share in stages)


@dataclass(frozen=True, slots=True)
class SimulatedHandle:
    outcome: StepResult
    ready_at: float

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.outcome


class SimulatedExecutor:
    """Simulated device that runs plans back to back, or a simulated pipeline of such stages.

    A plan takes the time of its blocking moves, then that of its slices (FastServe section 4.3). Overlapped moves queue
    for the link, one queue per direction; blocking moves go first.

    Args:
        stages: Number of equal stages, or each stage's relative compute time.
        alike: Returns a lower bound on how many of a request's next tokens are identical and do not finish it.
    """

    def __init__(
        self,
        cost: CostModel,
        sample: Callable[[Request, int], int] = position_as_token,
        stages: int | Sequence[float] = 1,
        *,
        fails: Callable[[Move], bool] = never,
        alike: Callable[[Request], int] = none,
        jitter: Callable[[], float] = exactly,
        block_size: int = 16,
    ) -> None:
        self._shares = stage_shares(stages)
        self._cost = cost
        self._sample = sample
        self._fails = fails
        self._alike = alike
        self._jitter = jitter
        self._block_size = block_size
        self._free_at = [0.0] * len(self._shares)
        self._has_run = False
        self._link_free_at = dict.fromkeys(LINK, 0.0)
        self._transit: list[tuple[float, int, Move]] = []  # heap of (end time, number, move)
        self._moves = 0

    def submit(self, plan: StepPlan, now: float) -> SimulatedHandle:
        begin = max(now, self._free_at[0])
        moving = self._transfer(plan.blocking)
        compute = self._cost.step(StepShape.of(plan.slices)) * self._jitter() if plan.slices else 0.0
        seconds = moving + compute
        parts = [moving / len(self._shares) + compute * share for share in self._shares]
        ready_at, stages = self._run(parts, now)
        # The last stage repeats the first stage's timing, delayed until it receives the plan.
        self._begin(plan, begin, begin + moving / len(parts), ready_at - parts[-1] - begin)
        if not (plan.slices or plan.blocking):
            ready_at = max(ready_at, min(begin + PAUSE_S, self._transit[0][0] if self._transit else begin))
        ended = list(plan.blocking)
        while self._transit and self._transit[0][0] <= ready_at:
            ended.append(heapq.heappop(self._transit)[2])
        tokens = tuple(
            self._sample(slice_.request, slice_.start + slice_.tokens) if slice_.samples else None
            for slice_ in plan.slices
        )
        failed = [move for move in ended if self._fails(move)]
        completed = [move for move in ended if move not in failed] if failed else ended
        result = StepResult(plan, tokens, seconds, moving=moving, completed=completed, failed=failed, stages=stages)
        return SimulatedHandle(result, ready_at)

    def on_finished(self, request: Request) -> None: ...

    def predict(self, handle: SimulatedHandle, most: int) -> list[float]:
        """Predict the ends of up to `most` identical decode steps, without moves; none if a request may finish now."""
        slices, ready_at = handle.outcome.plan.slices, handle.ready_at
        for slice_ in slices:
            request = slice_.request
            most = min(most, self._alike(request), request.max_total_tokens - request.progress.known - 1)
            if most < 1:
                return []
        shape, ends = StepShape.of(slices), [ready_at]
        prefill, attention, decodes, context = shape
        for _ in range(most - 1):
            context += decodes
            ready_at += self._cost.step(StepShape(prefill, attention, decodes, context))
            ends.append(ready_at)
        return ends

    def _run(self, parts: Sequence[float], now: float) -> tuple[float, tuple[StageTime, ...]]:
        ready_at, times = now, []
        for stage, (free_at, seconds) in enumerate(zip(self._free_at, parts, strict=True)):
            begin = max(ready_at, free_at)
            times.append(StageTime(seconds, begin - free_at if self._has_run else 0.0))
            ready_at = self._free_at[stage] = begin + seconds
        self._has_run = True
        return ready_at, tuple(times) if len(parts) > 1 else ()

    def _begin(self, plan: StepPlan, begin: float, moved: float, lag: float) -> None:
        link = self._link_free_at
        for direction, free_at in link.items():
            link[direction] = max(free_at, begin) + (moved - begin)
        if moved > begin:  # all remaining end times shift equally, so the heap stays valid
            late = moved - begin
            self._transit = [(at + late if at > begin else at, number, move) for at, number, move in self._transit]
        for move in plan.overlapped:
            link[move.direction] += self._cost.transfer(move.blocks(self._block_size)) / len(self._shares)
            self._moves += 1
            heapq.heappush(self._transit, (link[move.direction] + lag, self._moves, move))

    def _transfer(self, moves: Sequence[Move]) -> float:
        blocks = sum(move.blocks(self._block_size) for move in moves if move.direction in LINK)
        return self._cost.transfer(blocks) if blocks else 0.0
