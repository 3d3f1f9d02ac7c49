from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan, StepResult


class LargestStep(NamedTuple):
    """Limits of a step; `positions` is per request, prompt and output."""

    tokens: int
    seqs: int
    positions: int


class RankError(Exception):
    """A rank failed, was lost or timed out, so that all ranks must be restarted."""


class RankMemoryError(RankError):
    pass


class Handle(Protocol):
    def done(self) -> bool: ...

    def result(self) -> StepResult: ...


HandleT_co = TypeVar("HandleT_co", bound=Handle, covariant=True)


class Executor(Protocol[HandleT_co]):
    """Runs plans in submission order.

    Blocking moves of a plan finish before its slices run, swap-outs before swap-ins. Overlapped moves start after the
    blocking moves, and not before earlier plans have started. Each move is reported once.

    `submit` may read a plan's requests until the result is ready. The state of a request is kept from its first slice
    to `on_finished`, through preemptions.
    """

    def submit(self, plan: StepPlan, now: float) -> HandleT_co: ...

    def on_finished(self, request: Request) -> None:
        """Free a request's state after the plans submitted before. Called once for each request, started or not."""
        ...
