"""Remaining time as a value: what shortest remaining time first and ALISE order requests by."""

from __future__ import annotations

import math
from collections.abc import Callable

from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request
from skipjoin.core.step import StepShape


class RemainingTime:
    """Least remaining work first, in seconds: tokens that have no KV yet, then the tokens that are expected still to
    come (ALISE section 3.1, equations 3 to 5). With true lengths this is SRPT, the bound that the other orderings are
    held against.

    A request that outgrows its expected length is expected to get twice as long, and twice again, so that it falls
    behind rather than stay the one that is about to end.

    With age a request gains `aging` seconds of priority per second. As all gain alike, the key is the remaining time
    plus `aging` times the moment from which the age counts, and rests while the request waits.

    cost: prices the work, a token at the request's context. lengths: expected output tokens of a request in all. aging:
    0: none. since_arrival: whether the age counts from the arrival: nothing that arrives `seconds / aging` later
    overtakes the request any more. Otherwise it counts from when the request last ran, which bounds how long it goes
    without a token and not when it ends.
    """

    def __init__(
        self,
        cost: CostModel,
        lengths: Callable[[Request], float],
        *,
        aging: float = 0.0,
        since_arrival: bool = True,
    ) -> None:
        if not 0 <= aging < math.inf:
            raise ValueError(f"aging must be finite and at least 0, got {aging}")
        self.aging = aging
        self._since_arrival = since_arrival
        self._cost = cost
        self._lengths = lengths
        self._revision = cost.revision
        self._decode_seconds: dict[int, float] = {}

    @property
    def revision(self) -> int:
        if self._cost.revision != self._revision:
            self._revision = self._cost.revision
            self._decode_seconds.clear()
        return self._revision

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
        # Looked up by context in steps of 64 tokens: it changes slowly.
        bucket = known >> 6
        decode_seconds = self._decode_seconds.get(bucket) or self._fill_decode_seconds(bucket)
        seconds = (length - generated if length > generated else 1) * decode_seconds
        # Just sampled, a token waits for its own step, which is counted above; more than that is prefill.
        uncached = known - request.computed
        if uncached > 1:
            seconds += self._cost.step(StepShape(prefill=uncached, attention=uncached * (uncached + 1) // 2))
        return seconds

    def _fill_decode_seconds(self, bucket: int) -> float:
        seconds = self._cost.step(StepShape(decodes=1, context=(bucket << 6) + 1))
        self._decode_seconds[bucket] = seconds
        return seconds
