"""Remaining time as a value: what shortest remaining time first and ALISE order requests by."""

from __future__ import annotations

import math
from collections.abc import Callable

from skipjoin.core.request import Request
from skipjoin.policies.execution import ExecutionTime


class RemainingTime:
    """Least remaining work first, in seconds: tokens that have no KV yet, then the tokens that are expected still to
    come (ALISE section 3.1, equations 3 to 5). With true lengths this is SRPT, the bound that the other orderings are
    held against.

    A request that outgrows its expected length is expected to get twice as long, and twice again, so that it falls
    behind rather than stay the one that is about to end.

    With age a request gains `aging` seconds of priority per second. As all gain alike, the key is the remaining time
    plus `aging` times the moment from which the age counts, and rests while the request waits.

    time: prices the work. lengths: expected output tokens of a request in all. aging:
    0: none. since_arrival: whether the age counts from the arrival: nothing that arrives `seconds / aging` later
    overtakes the request any more. Otherwise it counts from when the request last ran, which bounds how long it goes
    without a token and not when it ends.
    """

    def __init__(
        self,
        time: ExecutionTime,
        lengths: Callable[[Request], float],
        *,
        aging: float = 0.0,
        since_arrival: bool = True,
    ) -> None:
        if not 0 <= aging < math.inf:
            raise ValueError(f"aging must be finite and at least 0, got {aging}")
        self.aging = aging
        self._since_arrival = since_arrival
        self._time = time
        self._lengths = lengths

    @property
    def revision(self) -> int:
        return self._time.revision

    def key(self, request: Request, known: int, served: float, now: float) -> tuple[float]:
        since = request.arrival if self._since_arrival else served
        return (self.seconds(request, known) + self.aging * since,)

    def until(self, request: Request, now: float) -> float:
        return math.inf

    def tokens(self, request: Request, known: int) -> int:
        return 0

    def seconds(self, request: Request, known: int) -> float:
        """Remaining work of the request. known: its tokens, one just sampled included."""
        generated = known - len(request.prompt)
        length = self._lengths(request)
        while length < generated:
            length *= 2
        seconds = (length - generated if length > generated else 1) * self._time.decode(known)
        # Just sampled, a token waits for its own step, which is counted above; more than that is prefill.
        uncached = known - request.computed
        if uncached > 1:
            seconds += self._time.prefill(uncached)
        return seconds
