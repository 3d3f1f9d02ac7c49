from __future__ import annotations

import math

# Seconds of time for first tokens that may be used at once.
_BURST_S = 2.0


class FirstTokenPace:
    """Gate that gives requests without output precedence for at most a `share` of the time in (0, 1], with bursts."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._until = -math.inf  # time at which the used time has been paid for

    def spend(self, seconds: float, now: float) -> None:
        self._until = max(self._until, now - _BURST_S) + seconds / self._share

    def is_open(self, now: float) -> bool:
        return self._until <= now
