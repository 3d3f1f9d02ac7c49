"""The simple preemptive rule of BROS's section 2.2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from skipjoin.core.policy import Callbacks, Policies
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.ranking import Ranking
from skipjoin.recipes import Settings, recipe
from skipjoin.recipes.parts import preemptive


class LongestWait(Callbacks):
    """Longest time since the last step first, or since arrival."""

    def __init__(self) -> None:
        self._ranking = Ranking()

    def on_arrived(self, request: Request, now: float) -> None:
        self._ranking.set_stable(request, (request.arrival, request.arrival, request.id))

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        for slice_ in slices:
            self._ranking.set_volatile(slice_.request, (now, slice_.request.arrival, slice_.request.id))

    def on_finished(self, request: Request, now: float) -> None:
        self._ranking.discard(request)

    def ranked(self, now: float) -> Iterator[Request]:
        return iter(self._ranking)

    def rank(self, request: Request) -> Any:
        return self._ranking.key(request)

    def outranks(self, one: Request, other: Request) -> bool:
        waits_longer: bool = self.rank(one)[0] < self.rank(other)[0]
        return waits_longer

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.rank(request)[0], request) for request in sorted(requests, key=self.rank)]


@recipe
def longest_wait(s: Settings) -> Policies:
    """Requests that have waited longest since their last step first, with proactive swapping."""
    return preemptive(s, LongestWait)
