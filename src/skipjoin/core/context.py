from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan


def _none_swapped_out(request: Request) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class StepContext:
    """Inputs of a scheduling decision besides requests and KV.

    Attributes:
        latest: Requests whose last slice was in this plan or a later one are running.
        overlap: Whether a request may be scheduled while its input token is being sampled.
        in_flight: Plans that have not committed, oldest first.
        candidates: Requests that find blocks, in rank order, with the tokens to compute, without best-effort requests
            whose blocks real-time ones take. May be read once, before the first offer.
        blocks_swapped_out: Returns how many KV blocks of a request the step must swap in first.
        pausing: Requests that skip this step, so that they can be evicted in a later one.
    """

    now: float = 0.0
    plan_id: int = 0
    latest: int = 0
    depth: int = 1
    overlap: bool = False
    may_leave: bool = True
    decision: int = 0
    in_flight: Sequence[StepPlan] = ()
    candidates: Iterable[tuple[Request, int]] = ()
    blocks_swapped_out: Callable[[Request], int] = _none_swapped_out
    pausing: set[Request] = field(default_factory=set)

    def with_candidates(
        self,
        candidates: Iterable[tuple[Request, int]],
        blocks_swapped_out: Callable[[Request], int] = _none_swapped_out,
    ) -> StepContext:
        """Return a context that shares all else; `dataclasses.replace` takes four times as long."""
        return StepContext(
            self.now,
            self.plan_id,
            self.latest,
            self.depth,
            self.overlap,
            self.may_leave,
            self.decision,
            self.in_flight,
            candidates,
            blocks_swapped_out,
            self.pausing,
        )


def eligible_tokens(request: Request, context: StepContext) -> int:
    """Return how many tokens of the request a plan may compute now."""
    progress = request.progress
    if progress.awaits_grammar:
        return 0
    pending_samples = progress.pending_samples
    end = progress.known + pending_samples
    if end >= request.max_total_tokens or (pending_samples and not context.overlap):
        return 0
    pausing = context.pausing
    return 0 if pausing and request in pausing else end - progress.planned
