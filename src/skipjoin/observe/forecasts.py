"""How forecasts of output lengths came out: what error and coverage mean is said here alone."""

from __future__ import annotations

import math

from skipjoin.core.forecast import LENGTH_EDGES, Forecast

# What the interval of a forecast should hold.
COVERAGE = 0.8


def octaves_off(forecast: Forecast, tokens: int) -> float:
    """Distance of the expected length from the true one, as a power of two: 1 is twice or half of it."""
    return abs(math.log2(forecast.tokens / tokens))


def interval(forecast: Forecast) -> tuple[float, float]:
    """The lengths between which an output lies with probability `COVERAGE`, with as much on either side. A forecast
    without a distribution is one point."""
    if not forecast.mass:
        return forecast.tokens, forecast.tokens
    return _quantile(forecast, (1 - COVERAGE) / 2), _quantile(forecast, (1 + COVERAGE) / 2)


def _quantile(forecast: Forecast, share: float) -> float:
    """The length that this share of the probability lies below; within a bin it is even over logarithms."""
    left = share * sum(forecast.mass)
    for index, mass in enumerate(forecast.mass):
        if left <= mass:
            low, high = LENGTH_EDGES[index], _upper_edge(index)
            return low * (high / low) ** (left / mass if mass else 0.0)
        left -= mass
    return float(_upper_edge(len(forecast.mass) - 1))


def _upper_edge(index: int) -> int:
    """Where a bin ends; the last one, which does not, is taken to be as wide as the others."""
    return LENGTH_EDGES[index + 1] if index + 1 < len(LENGTH_EDGES) else round(LENGTH_EDGES[index] * math.sqrt(2))
