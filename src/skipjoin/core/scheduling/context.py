"""The situation that one step is decided in, and what a request can contribute to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan


def _none_away(request: Request) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a decision depends on besides requests and KV.

    now: seconds on the driver's clock. plan_id: of the plan that it becomes. latest: a request whose last slice was in
    this plan or a later one runs. depth, overlap: the scheduler's. may_leave: whether KV may leave with an overlapped
    move. decision: the number of this decision, whether a plan comes of it or not. in_flight: the plans that have not
    committed, oldest first.
    candidates: requests that could run, best first, each with the tokens that it has to compute; of those without KV
    on the device, the ones that find blocks: free ones, or for real-time requests those of best-effort ones, which then
    are no candidates. It is made while it is read, and is to be read once, before any request is offered. The requests
    that are offered, and that get space in the end, may differ.
    blocks_away: of a request, the KV blocks that a step which runs it has to bring from the host.
    pausing: requests that do not run in this step, so that they can be evicted once no plan in flight holds them.
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
    blocks_away: Callable[[Request], int] = _none_away
    pausing: set[Request] = field(default_factory=set)


def eligible_tokens(request: Request, context: StepContext) -> int:
    """Tokens of the request that a plan may take up now; 0 if it is not eligible: plans in flight sample all that it
    may generate, its next input token has to be known first, or it pauses for an eviction. Pure."""
    pending_samples = request.pending_samples
    end = request.known + pending_samples
    if end >= request.max_total_tokens or (pending_samples and not context.overlap):
        return 0
    pausing = context.pausing
    return 0 if pausing and request in pausing else end - request.planned
