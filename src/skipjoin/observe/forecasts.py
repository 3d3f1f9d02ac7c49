from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from statistics import StatisticsError, correlation, fmean

from skipjoin.observe.record import Record, rounded

# Relative error below which a prediction counts as accurate.
_NEAR = 0.25


class ForecastLog:
    def __init__(self) -> None:
        self._pairs: list[tuple[float, int]] = []
        self._covered: list[bool] = []
        self._sources: Counter[str] = Counter()

    @classmethod
    def of(cls, logs: Iterable[ForecastLog]) -> ForecastLog:
        whole = cls()
        for log in logs:
            whole._pairs += log._pairs
            whole._covered += log._covered
            whole._sources += log._sources
        return whole

    def add(self, forecast: float, tokens: int, source: str, interval: tuple[float, float] | None = None) -> None:
        self._pairs.append((forecast, tokens))
        self._sources[source] += 1
        if interval is not None:
            self._covered.append(interval[0] <= tokens <= interval[1])

    def summary(self) -> Record:
        """Return accuracy figures, None where they are not defined.

        `r_log` correlates logarithms; `within_25` and `coverage_80` are shares within 25 % and within the interval.
        """
        pairs, covered = self._pairs, self._covered
        if not pairs:
            return {"r_log": None, "mae": None, "within_25": None, "coverage_80": None, "sources": {}}
        return {
            "r_log": self._correlation(),
            "mae": rounded(fmean(abs(forecast - tokens) for forecast, tokens in pairs)),
            "within_25": rounded(fmean(abs(forecast - tokens) <= _NEAR * tokens for forecast, tokens in pairs)),
            "coverage_80": rounded(fmean(covered)) if covered else None,
            "sources": {name: rounded(count / len(pairs)) for name, count in sorted(self._sources.items())},
        }

    def _correlation(self) -> float | None:
        logs = [(math.log(forecast), math.log(tokens)) for forecast, tokens in self._pairs]
        try:
            return rounded(correlation(*zip(*logs, strict=True)))
        except StatisticsError:  # one pair, or a constant
            return None
