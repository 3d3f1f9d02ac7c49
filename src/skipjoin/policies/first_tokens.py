from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator

from skipjoin.core.request import Request

# Time for first tokens that may be used at once, in decode steps, and the part of it for prompts computed ahead.
_BURST_STEPS, _AHEAD_STEPS = 80, 40


class FirstTokenPace:
    """Gate that gives requests without output precedence for at most a `share` of the time in (0, 1], with bursts."""

    def __init__(self, share: float, step_s: float) -> None:
        self.share = share
        self.step_s = step_s  # seconds of a decode step, which may be updated
        self._until = -math.inf  # time at which the used time has been paid for

    def spend(self, seconds: float, now: float) -> None:
        self._until = max(self._until, now - _BURST_STEPS * self.step_s) + seconds / self.share

    def is_open(self, now: float) -> bool:
        return self._until <= now


class PromptAdvances:
    """Gate that bounds the time of prompts which are computed ahead, for requests that then wait.

    Such a prompt counts until its request continues, or for good if its KV is lost before. What counts is worked off by
    a `share` of the time, which may be updated as `step_s` may.
    """

    def __init__(self, share: float, step_s: float) -> None:
        self.share = share
        self.step_s = step_s
        self.waiting: dict[Request, float] = {}  # seconds of the prompts of requests that have not continued
        self._owed_s = 0.0  # as of `_now`
        self._now = 0.0

    def spend(self, seconds: float, now: float) -> None:
        self._work_off(now)
        self._owed_s += seconds

    def advance(self, request: Request, seconds: float, now: float) -> None:
        self.spend(seconds, now)
        self.waiting[request] = self.waiting.get(request, 0.0) + seconds

    def forget(self, request: Request, *, continues: bool) -> None:
        seconds = self.waiting.pop(request, 0.0)
        if continues:
            self._owed_s -= seconds

    def is_open(self, now: float) -> bool:
        self._work_off(now)
        return self._owed_s <= 0

    def _work_off(self, now: float) -> None:
        owed_s = self._owed_s - self.share * (now - self._now)
        self._owed_s = max(owed_s, -_AHEAD_STEPS * self.step_s)
        self._now = now


class RequestHeap:
    """Requests by a key, the least one first. Those that finish stay until they outnumber the others."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def first(self) -> Request:
        return self._entries[0][2]

    def add(self, key: float, request: Request) -> None:
        heapq.heappush(self._entries, (key, request.id, request))

    def pop(self) -> Request:
        return heapq.heappop(self._entries)[2]

    def sweep(self, live: Collection[Request]) -> None:
        if len(self._entries) > 2 * len(live) + 256:
            self._entries = [entry for entry in self._entries if entry[2] in live]
            heapq.heapify(self._entries)


class Alarms(RequestHeap):
    def due(self, now: float) -> Iterator[Request]:
        while self._entries and self._entries[0][0] <= now:
            yield self.pop()
