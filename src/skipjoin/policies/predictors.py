"""Expected output lengths: where policies get them from."""

from __future__ import annotations

import math

from skipjoin.core.forecast import Forecast, length_quantile
from skipjoin.core.request import Request

# Expected of a request that has no forecast. A small number: with doubling, requests are then told apart as by feedback
# queues, and short ones lose little.
NO_FORECAST_TOKENS = 16


def forecast_tokens(request: Request) -> float:
    """The length that the request's forecast expects, `NO_FORECAST_TOKENS` without one; at least 1, and at most
    `max_tokens`."""
    expected = NO_FORECAST_TOKENS if request.forecast is None else request.forecast.tokens
    return min(max(expected, 1), request.max_tokens)


# Points of distributions that are kept, by request.
_MOST_POINTS = 8192


class ForecastQuantile:
    """As `forecast_tokens`, but where the forecast has a distribution, the length below which the share `level` of it
    lies.

    A request that was taken for a short one outgrows its length at small cost, one that was taken for a long one waits
    for nothing. So a point below the mean serves best, the more so the less is known.
    """

    def __init__(self, level: float) -> None:
        if not 0 < level < 1:
            raise ValueError(f"level must be above 0 and below 1, got {level}")
        self._level = level
        self._points: dict[int, tuple[Forecast, float]] = {}

    def __call__(self, request: Request) -> float:
        forecast = request.forecast
        if forecast is None or not forecast.mass:
            return forecast_tokens(request)
        # Asked for with every token: kept while the forecast is the same object.
        kept = self._points.get(request.id)
        if kept is None or kept[0] is not forecast:
            if len(self._points) >= _MOST_POINTS:
                self._points.clear()
            kept = self._points[request.id] = forecast, length_quantile(forecast.mass, self._level)
        return min(kept[1], request.max_tokens)


def most_tokens(request: Request) -> int:
    """The length that the request asks for at most. Where outputs run to max_tokens, as in experiments that force
    output lengths, this is the true length: an oracle."""
    return request.max_tokens


# Buckets of lengths, half an octave wide, up to 2 ** 20 tokens.
_BUCKETS = 41
# Weight that older lengths keep when another one is learnt: the last 500 or so count.
_KEPT = 0.998
# What is expected before anything was learnt, with the weight of one request: answers of chats are about as long.
_FIRST_GUESS = 128


class LearntLength:
    """The mean length of the requests that ended of late, among those that were longer than this one is by now, each
    cut at what this one may generate at most. So the expectation grows with a request that goes on, as it must where
    lengths are skewed: a request that has generated much is likely to generate much more.
    """

    def __init__(self) -> None:
        self._weights = [0.0] * _BUCKETS
        self._tokens = [0.0] * _BUCKETS  # the weighted sum of lengths
        self._add(_FIRST_GUESS)

    def learn(self, request: Request) -> None:
        """A request came to its own end: it has generated all that it was to generate."""
        for bucket in range(_BUCKETS):
            self._weights[bucket] *= _KEPT
            self._tokens[bucket] *= _KEPT
        self._add(max(1, len(request.output)))

    def predict(self, request: Request) -> int:
        generated, most = len(request.output), request.max_tokens
        weight = total = 0.0
        for bucket in range(_bucket(max(1, generated)), _BUCKETS):
            if (share := self._weights[bucket]) > 0 and (mean := self._tokens[bucket] / share) > generated:
                weight += share
                total += share * min(mean, most)
        # Longer than anything seen of late: as much again.
        expected = round(total / weight) if weight else 2 * generated
        return min(most, max(expected, generated + 1))

    def _add(self, length: int) -> None:
        bucket = _bucket(length)
        self._weights[bucket] += 1.0
        self._tokens[bucket] += length


def _bucket(length: int) -> int:
    return min(_BUCKETS - 1, int(2 * math.log2(length)))
