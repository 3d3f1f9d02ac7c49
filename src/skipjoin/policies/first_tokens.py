from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator

from skipjoin.core.request import Request

# Time for first tokens that may be used at once, in decode steps.
_BURST_STEPS = 80


class FirstTokenPace:
    """Gate that gives requests without output precedence for at most a `share` of the time in (0, 1], with bursts.

    Args:
        step_s: Seconds of a decode step, which may be updated.
    """

    def __init__(self, share: float, step_s: float) -> None:
        self._share = share
        self.step_s = step_s
        self._until = -math.inf  # time at which the used time has been paid for

    def spend(self, seconds: float, now: float) -> None:
        self._until = max(self._until, now - _BURST_STEPS * self.step_s) + seconds / self._share

    def is_open(self, now: float) -> bool:
        return self._until <= now


class Alarms:
    """Requests by the time at which they are due. Those that finish stay until they outnumber the others."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []

    def add(self, when: float, request: Request) -> None:
        heapq.heappush(self._entries, (when, request.id, request))

    def due(self, now: float) -> Iterator[Request]:
        while self._entries and self._entries[0][0] <= now:
            yield heapq.heappop(self._entries)[2]

    def sweep(self, live: Collection[Request]) -> None:
        if len(self._entries) > 2 * len(live) + 256:
            self._entries = [entry for entry in self._entries if entry[2] in live]
            heapq.heapify(self._entries)
