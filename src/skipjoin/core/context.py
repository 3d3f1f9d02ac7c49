from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan


def _none_swapped_out(request: Request) -> int:
    return 0


class StepContext(NamedTuple):
    """Inputs of a scheduling decision besides requests and KV."""

    now: float = 0.0
    plan_id: int = 0
    latest: int = 0  # requests whose last slice was in this plan or a later one are running
    depth: int = 1
    overlap: bool = False  # a request may be scheduled while its input token is being sampled
    may_leave: bool = True  # overlapped swap-outs may start
    decision: int = 0
    in_flight: Sequence[StepPlan] = ()  # plans that have not committed, oldest first
    # Requests that find blocks, in rank order, with the tokens to compute, without best-effort requests whose blocks
    # real-time ones take. May be read once, before the first offer.
    candidates: Iterable[tuple[Request, int]] = ()
    blocks_swapped_out: Callable[[Request], int] = _none_swapped_out  # KV blocks that the step must swap in first
    pausing: Collection[Request] = ()  # `Draft.pausing`, to which the decision still adds


def eligible_tokens(request: Request, context: StepContext) -> int:
    progress = request.progress
    if progress.awaits_grammar:
        return 0
    pending_samples = progress.pending_samples
    end = progress.known + pending_samples
    if end >= request.max_total_tokens or (pending_samples and not context.overlap):
        return 0
    pausing = context.pausing
    return 0 if pausing and request in pausing else end - progress.planned
