"""Executor protocol: run step plans in order and return their results."""

from __future__ import annotations

from typing import Protocol, TypeVar

from skipjoin.core.step import StepPlan, StepResult


class RankError(Exception):
    """A rank failed, was lost or timed out; all ranks must be restarted."""


class RankMemoryError(RankError):
    """A rank ran out of memory in a step."""


class Handle(Protocol):
    """Future of a submitted plan."""

    def done(self) -> bool:
        """Return whether `result` returns without blocking."""
        ...

    def result(self) -> StepResult:
        """Wait for the plan and return its result, or raise the step's exception."""
        ...


HandleT_co = TypeVar("HandleT_co", bound=Handle, covariant=True)


class Executor(Protocol[HandleT_co]):
    """Runs plans in submission order.

    Moves that a plan blocks on land before its slices run, and swap-outs run before swap-ins. Overlapped moves start
    after the blocking moves, and not before earlier plans have started. Each move is reported exactly once, in `landed`
    or `failed`: a blocking move in the result of its own plan, an overlapped move in that result or a later one. A plan
    without slices collects moves that finish while no slice runs.

    In a pipeline, each stage runs its share of a plan once the previous stage has passed the plan on. It finishes that
    share before it starts the next plan, so the pipeline depth bounds the number of plans in flight. A result's
    `seconds` and `moving` are then sums over the stages, which is what cost models predict and learn. Its `stages`
    holds the busy and idle time of each stage.

    `submit` may read a plan's requests (prompt, output, sampling) until the result is ready. Known tokens never change,
    and a slice whose last token is still pending is marked `awaits`.
    """

    def submit(self, plan: StepPlan, now: float) -> HandleT_co:
        """Submit a plan.

        Args:
            now: Seconds on the driver's clock.
        """
        ...
