from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.request import RequestStatus

from skipjoin.core.request import Request
from skipjoin.core.step import REQUEST_OF, SAMPLES_OF, TOKENS_OF, Slice, StepPlan

_RUNNING = RequestStatus.RUNNING


class Batch:
    """Requests of a plan that can run: `running` in vLLM already, in the order of the plan, and `joining`.

    `cuts` has the tokens of requests that stop before their last known token.
    """

    running: list[Any]
    tokens: dict[str, int]
    _ran: list[Any]
    __slots__ = ("_decodes", "_ends", "_mirrors", "_ran", "cuts", "joining", "plan", "running", "tokens")

    def __init__(self, plan: StepPlan, left: Collection[Any], running: list[Any], before: Batch | None) -> None:
        """Divide a plan's requests, except those `left`, by whether vLLM runs them.

        `before` is an earlier step's batch, whose requests are usually decoded again and need no look at each.
        """
        self.plan, slices = plan, plan.slices
        if left:
            slices = tuple(slice_ for slice_ in slices if slice_.request.sampling not in left)
        self.joining: list[Any] = []
        self._ends: list[int] = []  # of the joining ones, in tokens
        self.cuts: dict[str, int] = {}
        self._mirrors = [*map(REQUEST_OF, slices)]
        self._decodes = sum(map(TOKENS_OF, slices)) == len(slices) and all(map(SAMPLES_OF, slices))
        if before is not None and self._decodes and before.is_followed_by(self._mirrors, running):
            self.running, self._ran, self.tokens = running, before._ran, before.tokens
            return
        self.running, self.tokens = [], {}
        for mirror, start, tokens, samples, _, _ in slices:
            request: Any = mirror.sampling
            self.tokens[request.request_id] = tokens
            if request.status is _RUNNING:
                self.running.append(request)
            else:
                self.joining.append(request)
                self._ends.append(start + tokens)
            if not samples:
                self.cuts[request.request_id] = tokens
        self._ran = [*self.running]  # vLLM changes its own list

    def is_followed_by(self, mirrors: Sequence[Request], running: Sequence[Any]) -> bool:
        """Return whether a batch that decodes `mirrors` while vLLM runs `running` would be the same."""
        return self._decodes and not self.joining and mirrors == self._mirrors and running == self._ran

    def is_run_by(self, scheduled: Mapping[str, int]) -> bool:
        if scheduled != self.tokens or len(self.tokens) < len(self.plan.slices):
            return False
        return all(request.num_computed_tokens == end for request, end in zip(self.joining, self._ends, strict=True))

    def changes(self, scheduled: Mapping[str, int]) -> Iterator[tuple[Slice, Slice | None]]:
        """Yield each slice of the plan with the one that vLLM scheduled, or None for none."""
        for slice_ in self.plan.slices:
            tokens = scheduled.get(slice_.request.sampling.request_id, 0)  # type: ignore[attr-defined]
            yield slice_, slice_of(slice_.request, tokens, awaits=slice_.awaits) if tokens else None


def slice_of(mirror: Request, tokens: int, *, awaits: bool) -> Slice:
    request: Any = mirror.sampling
    return Slice(mirror, request.num_computed_tokens - tokens, tokens, not request.is_prefill_chunk, awaits, ())


def accepted(slice_: Slice) -> Slice:
    """Return a slice of a step that has run without its rejected drafts."""
    request: Any = slice_.request.sampling
    rejected = slice_.start + slice_.tokens - request.num_computed_tokens
    return slice_._replace(tokens=slice_.tokens - rejected) if 0 < rejected < slice_.tokens else slice_
