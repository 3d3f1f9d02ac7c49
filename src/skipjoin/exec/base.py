"""The Executor protocol: plans in, results out, in order."""

from __future__ import annotations

from typing import Protocol, TypeVar

from skipjoin.core.step import StepPlan, StepResult


class RankError(Exception):
    """A rank cannot go on, is gone, or does not answer. All ranks must be started anew."""


class Handle(Protocol):
    """A plan on its way."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> StepResult:
        """The outcome; blocks until it is there. Raises what the step raised."""
        ...


HandleT_co = TypeVar("HandleT_co", bound=Handle, covariant=True)


class Executor(Protocol[HandleT_co]):
    """Carries out plans in the order in which they are submitted.

    A plan's blocking moves land before its slices run, and those out before those in. Its overlapped moves begin after
    them, no sooner than its turn comes. Each move is in `landed` or in `failed` of one result, exactly once, whatever
    plan was the last: a blocking move in its own plan's. What ends without slices to run is asked for with plans that
    have none.

    In a pipeline every stage has its part of each plan, begins it when the stage before has handed it on, and ends it
    before it begins the next: as many plans can be under way as there are stages. `seconds` and `moving` of a result
    are then the sums over the stages, which is what cost models tell and learn; its `stages` say how long each stage
    worked, and how long it had to wait.

    `submit` may read what the plan's requests know (prompt, output, sampling) at any time until the result is
    there: known tokens never change, and a slice that awaits a token says so.
    """

    def submit(self, plan: StepPlan, now: float) -> HandleT_co:
        """Take a plan at `now` (seconds on the driver's clock)."""
        ...
