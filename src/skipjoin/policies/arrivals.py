from __future__ import annotations

import math

from skipjoin.core.request import Request

# Weight of the latest arrival in the moving means: about the last 50 arrivals count.
_RATE = 0.04
# Standard deviations above the mean: about one window in 40 exceeds the estimate.
_DEVIATIONS = 2.0


class ArrivalHistory:
    """Estimator of the prompt tokens that may arrive within a time window (FastServe section 4.2).

    It is the mean plus two standard deviations of a renewal process with exponentially weighted moments.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._gap = self._gap_square = math.inf
        self._tokens = self._tokens_square = 0.0

    def note(self, request: Request, now: float) -> None:
        tokens = len(request.prompt)
        if self._last is None:
            self._tokens, self._tokens_square = tokens, tokens**2
        else:
            gap = now - self._last
            if self._gap == math.inf:
                self._gap, self._gap_square = gap, gap**2
            self._gap += _RATE * (gap - self._gap)
            self._gap_square += _RATE * (gap**2 - self._gap_square)
            self._tokens += _RATE * (tokens - self._tokens)
            self._tokens_square += _RATE * (tokens**2 - self._tokens_square)
        self._last = now

    def tokens_within(self, seconds: float, now: float) -> float:
        if self._last is None or self._gap == math.inf:
            return 0.0
        # A pause longer than the mean gap also lowers the rate.
        gap = max(self._gap, now - self._last, 1e-9)
        requests = seconds / gap
        variation = max(0.0, self._gap_square - self._gap**2) / max(self._gap, 1e-9) ** 2
        spread = max(0.0, self._tokens_square - self._tokens**2)
        variance = requests * (spread + variation * self._tokens**2)
        return requests * self._tokens + _DEVIATIONS * math.sqrt(variance)
