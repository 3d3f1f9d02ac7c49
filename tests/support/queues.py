"""FastServe's queues without an engine, on a clock of whole seconds."""

from __future__ import annotations

import math
from typing import Any

from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.mlfq import SkipJoinMlfq
from support.load import make
from support.policies import UnitCost


class Queues:
    """A skip-join MLFQ ordering and the requests in it."""

    def __init__(self, *, starvation_s: float = 1e6, promotion_share: float = math.inf, **settings: Any) -> None:
        # Unless a test says otherwise, slots are short, so that contexts do not count.
        given = {"slots": 0.0, "starvation_s": starvation_s, "promotion_share": promotion_share} | settings
        self.mlfq = SkipJoinMlfq(UnitCost(), **given)
        self.now = 0.0
        self._count = 0

    def arrive(self, prompt: int) -> Request:
        request = make(self._count, prompt, 1000, arrival=self.now)
        self._count += 1
        self.mlfq.on_arrived(request, self.now)
        return request

    def run(self, request: Request, most: int = 1000) -> int:
        """Run one iteration of up to `most` tokens and return the level of the request afterwards."""
        tokens = min(most, request.progress.known - request.progress.computed)
        start, end = request.progress.computed, request.progress.computed + tokens
        request.progress.computed = request.progress.planned = end
        self.now += tokens
        self.mlfq.on_scheduled([Slice(request, start, tokens, end == request.progress.known, False, ())], self.now)
        request.progress.known += end == request.progress.known
        return self.mlfq.level(request)

    def drop(self, request: Request) -> None:
        request.progress.computed = request.progress.planned = 0
        self.mlfq.on_preempted(request, self.now)

    def order(self) -> list[Request]:
        return list(self.mlfq.ranked(self.now))

    def promoted(self, *requests: Request) -> list[Request]:
        self.order()
        return [request for request in requests if self.mlfq.level(request) == 0]
