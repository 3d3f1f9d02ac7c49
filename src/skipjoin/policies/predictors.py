from __future__ import annotations

import math

from skipjoin.core.forecast import Forecast, length_quantile
from skipjoin.core.request import Request

# Prediction without a forecast. It is small, so that with doubling, requests are separated as by feedback queues, and
# short ones lose little.
NO_FORECAST_TOKENS = 16


def forecast_tokens(request: Request) -> float:
    """Return the forecast within [1, max_tokens], or `NO_FORECAST_TOKENS` without one."""
    expected = NO_FORECAST_TOKENS if request.progress.forecast is None else request.progress.forecast.tokens
    return min(max(expected, 1), request.max_tokens)


# Cached quantiles.
_MAX_POINTS = 8192


class ForecastQuantile:
    """Quantile `level` of the forecast's length distribution; without a distribution, `forecast_tokens`.

    A level below the mean serves best: a request can outgrow an underestimate, but an overestimate only makes it wait.
    """

    def __init__(self, level: float) -> None:
        self._level = level
        self._points: dict[int, tuple[Forecast, float]] = {}

    def __call__(self, request: Request) -> float:
        forecast = request.progress.forecast
        if forecast is None or not forecast.mass:
            return forecast_tokens(request)
        # Cached per forecast object, as it is read with every token.
        kept = self._points.get(request.id)
        if kept is None or kept[0] is not forecast:
            if len(self._points) >= _MAX_POINTS:
                self._points.clear()
            kept = self._points[request.id] = forecast, length_quantile(forecast.mass, self._level)
        return min(kept[1], request.max_tokens)


def longest_output(request: Request) -> int:
    """Return max_tokens, the true length in experiments that force output lengths."""
    return request.max_tokens


# Half-octave buckets of lengths up to 2 ** 20 tokens.
_BUCKETS = 41
# Decay of older lengths per learned length: about the last 500 count.
_KEPT = 0.998
# Initial prediction with the weight of one request: a typical chat answer.
_FIRST_GUESS = 128


class LearnedLength:
    """Mean length of recently finished requests that were longer than the current output, each capped at max_tokens."""

    def __init__(self) -> None:
        self._weights = [0.0] * _BUCKETS
        self._tokens = [0.0] * _BUCKETS  # weighted sums of lengths
        self._add(_FIRST_GUESS)

    def learn(self, request: Request) -> None:
        for bucket in range(_BUCKETS):
            self._weights[bucket] *= _KEPT
            self._tokens[bucket] *= _KEPT
        self._add(max(1, len(request.progress.output)))

    def predict(self, request: Request) -> int:
        generated, most = len(request.progress.output), request.max_tokens
        weight = total = 0.0
        for bucket in range(_bucket(max(1, generated)), _BUCKETS):
            if (share := self._weights[bucket]) > 0 and (mean := self._tokens[bucket] / share) > generated:
                weight += share
                total += share * min(mean, most)
        # Longer than all recent requests: predict twice the output.
        expected = round(total / weight) if weight else 2 * generated
        return min(most, max(expected, generated + 1))

    def _add(self, length: int) -> None:
        bucket = _bucket(length)
        self._weights[bucket] += 1.0
        self._tokens[bucket] += length


def _bucket(length: int) -> int:
    return min(_BUCKETS - 1, int(2 * math.log2(length)))
