"""An executor that computes nothing: a cost model says how long each plan takes, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request
from skipjoin.core.step import Move, StepPlan, StepResult, StepShape


def position_as_token(request: Request, position: int) -> int:
    """A sampler for when only lengths matter."""
    return position


@dataclass(frozen=True, slots=True)
class SimulatedHandle:
    """A plan that lands at `ready_at`, in seconds on the virtual clock."""

    outcome: StepResult
    ready_at: float

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.outcome


class SimulatedExecutor:
    """One device that runs plans back to back, or a pipeline of stages that each do so.

    A plan takes the time of its `before` moves, then the longer of its slices and its `beside` moves. Every stage has
    an equal share of the layers, hence of all these times, and begins a plan when it is free and the stage before it
    has handed the plan on; its own part of the moves comes first (FastServe section 4.3). So as many plans run at
    once as there are stages, and none overtakes another.

    cost: seconds of steps, all stages together, and of transfers. sample: the token that a request gets at a
    position. stages: at least 1.
    """

    def __init__(
        self, cost: CostModel, sample: Callable[[Request, int], int] = position_as_token, stages: int = 1
    ) -> None:
        if stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        self._cost = cost
        self._sample = sample
        self._free_at = [0.0] * stages

    def submit(self, plan: StepPlan, now: float) -> SimulatedHandle:
        moving = self._transfer(plan.before)
        compute = self._cost.step(StepShape.of(plan.slices)) if plan.slices else 0.0
        seconds = moving + max(compute, self._transfer(plan.beside))
        tokens = tuple(
            self._sample(piece.request, piece.start + piece.tokens) if piece.samples else None for piece in plan.slices
        )
        return SimulatedHandle(StepResult(plan, tokens, seconds, moving=moving), self._run(seconds, now))

    def _run(self, seconds: float, now: float) -> float:
        """Occupy the stages one after the other; when the last one is done."""
        ready_at = now
        for stage, free_at in enumerate(self._free_at):
            ready_at = max(ready_at, free_at) + seconds / len(self._free_at)
            self._free_at[stage] = ready_at
        return ready_at

    def _transfer(self, moves: tuple[Move, ...]) -> float:
        blocks = sum(len(move.source) for move in moves)
        return self._cost.transfer(blocks) if blocks else 0.0
