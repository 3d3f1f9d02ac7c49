from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# Decay per request: the last few hundred count.
_KEPT = 0.995


@dataclass(slots=True)
class Stats:
    """Total counts and recent averages. Lengths are `known` of requests that ended by themselves or at max_tokens."""

    forecasts: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    known: int = 0
    covered: int = 0
    error_tokens: float = 0.0
    _weight: float = 0.0
    _error: float = 0.0
    _covered: float = 0.0

    def made(self, source: str) -> None:
        self.forecasts[source] += 1

    def learned(self, expected: float, interval: tuple[float, float], tokens: int, known: bool) -> None:
        self.requests += 1
        if not known:
            return
        error, inside = abs(expected - tokens), interval[0] <= tokens <= interval[1]
        self.known += 1
        self.covered += inside
        self.error_tokens += error
        self._weight = self._weight * _KEPT + 1
        self._error = self._error * _KEPT + error
        self._covered = self._covered * _KEPT + inside

    @property
    def error(self) -> float:
        return self._error / max(self._weight, 1.0)

    @property
    def coverage(self) -> float:
        return self._covered / max(self._weight, 1.0)
