"""The Executor protocol: takes step plans and returns step results, in order."""

from __future__ import annotations

from typing import Protocol, TypeVar

from skipjoin.core.step import StepPlan, StepResult


class RankError(Exception):
    """A rank failed, was lost, or did not answer in time. All ranks must be restarted."""


class RankMemoryError(RankError):
    """A rank ran out of memory in a step."""


class Handle(Protocol):
    """A submitted plan."""

    def done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> StepResult:
        """The plan's result; blocks until it is ready. Raises the step's exception."""
        ...


HandleT_co = TypeVar("HandleT_co", bound=Handle, covariant=True)


class Executor(Protocol[HandleT_co]):
    """Carries out plans in the order in which they are submitted.

    A plan's blocking moves land before its slices run; moves out run before moves in. Its overlapped moves start after
    the blocking moves, and not before earlier plans have started. Each move appears exactly once, in `landed` or
    `failed` of one result: a blocking move in the result of its own plan, an overlapped move in that of its plan or a
    later one. Plans without slices collect moves that end while no slice runs.

    In a pipeline, each stage runs its share of a plan when the stage before has handed the plan on, and finishes it
    before it starts the next: as many plans can be in flight as there are stages. `seconds` and `moving` of a result
    are then sums over the stages, the quantity that cost models predict and learn; `stages` holds each stage's busy and
    idle time.

    `submit` may read the requests of a plan (prompt, output, sampling) at any time until the result is ready: known
    tokens never change, and a slice with a pending last token is marked `awaits`.
    """

    def submit(self, plan: StepPlan, now: float) -> HandleT_co:
        """Submit a plan at `now` (seconds on the driver's clock)."""
        ...
