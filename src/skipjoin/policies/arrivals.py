"""How fast, and how evenly, requests have been arriving."""

from __future__ import annotations

import math

from skipjoin.core.request import Request

# Weight of the latest arrival in the means: they follow the last 50 or so.
_RATE = 0.04
# Standard deviations above the mean: a burst as large comes about once in 40 windows.
_DEVIATIONS = 2.0


class ArrivalHistory:
    """How many tokens of prompts may arrive within a while, judged by the arrivals so far (FastServe section 4.2 sizes
    its reserved slots by "historical job arrival patterns" and leaves the estimator open).

    Exponentially weighted means and mean squares of the gaps between arrivals and of the prompts' lengths, taken as a
    renewal process: in a window of w seconds w / mean gap requests arrive, with that times the squared coefficient of
    variation of the gaps as variance. The estimate is the mean plus two standard deviations. So it grows with the
    rate, with burstiness and with uneven lengths, costs a few operations per arrival, and forgets.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._gap = self._gap_square = math.inf
        self._tokens = self._tokens_square = 0.0

    def note(self, request: Request, now: float) -> None:
        """A request arrived."""
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
        """Prompt tokens that may arrive in the next `seconds`; 0 before the second arrival."""
        if self._last is None or self._gap == math.inf:
            return 0.0
        # A silence longer than usual is news, too.
        gap = max(self._gap, now - self._last, 1e-9)
        requests = seconds / gap
        variation = max(0.0, self._gap_square - self._gap**2) / max(self._gap, 1e-9) ** 2
        spread = max(0.0, self._tokens_square - self._tokens**2)
        variance = requests * (spread + variation * self._tokens**2)
        return requests * self._tokens + _DEVIATIONS * math.sqrt(variance)
