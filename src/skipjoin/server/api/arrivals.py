from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from skipjoin.core.request import ServiceClass

KEEP_S = 3600.0
MAX_ARRIVALS = 50_000


class Arrival(NamedTuple):
    """One choice that is no longer live, to be replayed in the simulator."""

    at: float
    prompt_tokens: int
    output_tokens: int
    service: ServiceClass
    ttft_s: float | None
    jct_s: float
    owner: str
    number: int = -1
    submit_s: float = 0.0
    first_at: float | None = None

    def public(self, around_s: float | None) -> dict[str, Any]:
        names = ("at", "prompt_tokens", "output_tokens", "service", "ttft_s", "jct_s")
        return {**{name: getattr(self, name) for name in names}, "around_s": around_s}


class ArrivalLog:
    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: deque[Arrival] = deque(maxlen=MAX_ARRIVALS)

    def add(self, arrival: Arrival) -> None:
        self._kept.append(arrival)

    def since(self, seconds: float, owner: str | None) -> list[Arrival]:
        oldest = self._clock() - min(seconds, KEEP_S)
        found = (arrival for arrival in self._kept if arrival.at >= oldest and owner in (None, arrival.owner))
        return sorted(found, key=lambda arrival: arrival.at)
