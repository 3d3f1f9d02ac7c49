from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

# Lower edges of the bins of output lengths in tokens, half an octave apart, up to 2 ** 20. Bin i has the lengths in
# [LENGTH_EDGES[i], LENGTH_EDGES[i + 1]); the last bin is unbounded.
LENGTH_EDGES: tuple[int, ...] = tuple(sorted({round(2 ** (half / 2)) for half in range(41)}))


# Probability below which an event is impossible within the precision of a sum.
_MIN_SHARE = 1e-9


def length_bin(tokens: float) -> int:
    return bisect_right(LENGTH_EDGES, tokens) - 1


def length_quantile(mass: Sequence[float], level: float) -> float:
    """Return the quantile `level` of lengths in tokens, at least 1, spread evenly on a log scale within a bin."""
    below, index = 0.0, 0
    for index, share in enumerate(mass):  # noqa: B007 (used after the loop)
        if below + share >= level:
            break
        below += share
    first, end = _edges(index)
    if end - first <= 1 or not mass[index]:
        return float(first)
    return float(first * (end / first) ** min(1.0, max(0.0, (level - below) / mass[index])))


def share_below(mass: Sequence[float], tokens: float) -> float:
    """Return the probability of fewer than `tokens` tokens, the inverse of `length_quantile`."""
    place = length_bin(tokens)
    below = math.fsum(mass[:place])
    if place >= len(mass):
        return below
    first, end = _edges(place)
    inside = math.log(tokens / first) / math.log(end / first) if end - first > 1 else 0.0
    return below + mass[place] * inside


def mean_from(mass: Sequence[float], tokens: float) -> float | None:
    """Return the mean of the lengths of at least `tokens` tokens, if one is expected."""
    total = weighted = 0.0
    for place in range(length_bin(tokens), len(mass)):
        first, end = _edges(place)
        low = max(first, tokens)
        share = mass[place] * math.log(end / low) / math.log(end / first)
        total += share
        weighted += share * (first if end - first <= 1 else (end - low) / math.log(end / low))
    return weighted / total if total > _MIN_SHARE else None


def _edges(place: int) -> tuple[int, float]:
    first = LENGTH_EDGES[place]
    return first, LENGTH_EDGES[place + 1] if place + 1 < len(LENGTH_EDGES) else first * math.sqrt(2)


class Forecast(NamedTuple):
    """Predicted output length of a request, made before its first token."""

    tokens: float  # at least 1
    source: str
    mass: tuple[float, ...] = ()  # probability of each bin of `LENGTH_EDGES`, without trailing zeros; empty if unknown
