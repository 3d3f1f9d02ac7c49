"""Executor protocol: run step plans in order and return their results."""

from __future__ import annotations

from typing import Protocol, TypeVar

from skipjoin.core.request import Request
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

    Blocking moves of a plan land before its slices run, swap-outs before swap-ins. Overlapped moves start after the
    blocking moves, and not before earlier plans have started. Each move is reported once, in `landed` or `failed`: a
    blocking move in its own plan's result, an overlapped move in that result or a later one. A plan without slices
    collects moves that finish while no slice runs.

    In a pipeline, each stage runs its share of a plan once the previous stage has passed it on, one plan at a time. A
    result's `seconds` and `moving` are then sums over the stages, which is what cost models predict and learn. Its
    `stages` holds each stage's busy and idle time.

    `submit` may read a plan's requests (prompt, output, sampling) until the result is ready. Known tokens never change,
    and a slice whose last token is still pending is marked `awaits`.

    A request starts with the first plan that has a slice of it, and ends with `on_finished`. In between an executor may
    keep state for it, which preemption must not change. After a restart it makes the state again from the request's
    known tokens.
    """

    def submit(self, plan: StepPlan, now: float) -> HandleT_co:
        """Submit a plan.

        Args:
            now: Seconds on the driver's clock.
        """
        ...

    def on_finished(self, request: Request) -> None:
        """Free the state of a request that no later plan contains, after the plans submitted before.

        Called once for each request, whether it has started or not.
        """
        ...
