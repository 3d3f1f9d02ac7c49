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
    """One device that runs plans back to back.

    A plan takes the time of its `before` moves, then the longer of its slices and its `beside` moves.

    cost: seconds of steps and transfers. sample: the token that a request gets at a position.
    """

    def __init__(self, cost: CostModel, sample: Callable[[Request, int], int] = position_as_token) -> None:
        self._cost = cost
        self._sample = sample
        self._free_at = 0.0

    def submit(self, plan: StepPlan, now: float) -> SimulatedHandle:
        seconds = self._seconds(plan)
        self._free_at = max(now, self._free_at) + seconds
        tokens = tuple(
            self._sample(piece.request, piece.start + piece.tokens) if piece.samples else None for piece in plan.slices
        )
        return SimulatedHandle(StepResult(plan, tokens, seconds), self._free_at)

    def _seconds(self, plan: StepPlan) -> float:
        compute = self._cost.step(StepShape.of(plan.slices)) if plan.slices else 0.0
        return self._transfer(plan.before) + max(compute, self._transfer(plan.beside))

    def _transfer(self, moves: tuple[Move, ...]) -> float:
        blocks = sum(len(move.source) for move in moves)
        return self._cost.transfer(blocks) if blocks else 0.0
