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

    With `aging_s` seconds of age, counted from its arrival, a request is as good as one that has e times less to do. As
    all age alike, the key is the logarithm of the remaining time plus the arrival over `aging_s`, and rests while the
    request waits. So nothing that arrives `aging_s` times the logarithm of the two remaining times' ratio later
    overtakes it any more: requests that differ a little swap places for a short while only, however fast the machine.

    time: prices the work. lengths: expected output tokens of a request in all. aging_s: inf: age does not count.
    """

    def __init__(
        self,
        time: ExecutionTime,
        lengths: Callable[[Request], float],
        *,
        aging_s: float = math.inf,
    ) -> None:
        if not aging_s > 0:
            raise ValueError(f"aging_s must be above 0, got {aging_s}")
        self._aging_s = aging_s
        self._time = time
        self._lengths = lengths

    @property
    def revision(self) -> int:
        return self._time.revision

    def key(self, request: Request, known: int, now: float) -> tuple[float]:
        return (math.log(self.seconds(request, known)) + request.arrival / self._aging_s,)

    def until(self, request: Request, now: float) -> float:
        return math.inf

    def tokens(self, request: Request, known: int) -> int:
        return 0

    def promoted(self, key: float) -> float:
        """When its age puts a request with this key before everything that is still to arrive (ALISE equation 7), on
        the driver's clock; inf: never."""
        return self._aging_s * (key - math.log(self._time.decode(1)))

    def seconds(self, request: Request, known: int) -> float:
        """Remaining work of the request. known: its tokens, one just sampled included."""
        generated = known - len(request.prompt)
        length = self._lengths(request)
        while length < generated:
            length *= 2
        seconds = (length - generated if length > generated else 1) * self._time.decode(known)
        # Just sampled, a token waits for its own step, which is counted above; more than that is prefill.
        uncached = known - request.reached
        if uncached > 1:
            seconds += self._time.prefill(uncached)
        return seconds
