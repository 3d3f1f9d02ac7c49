"""Forecasts of output lengths, which requests carry."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

# Lower edges of the bins of output lengths in tokens, half an octave apart, up to 2 ** 20. Bin i has the lengths in
# [LENGTH_EDGES[i], LENGTH_EDGES[i + 1]); the last bin is unbounded.
LENGTH_EDGES: tuple[int, ...] = tuple(sorted({round(2 ** (half / 2)) for half in range(41)}))


def length_bin(tokens: float) -> int:
    return bisect_right(LENGTH_EDGES, tokens) - 1


def length_quantile(mass: Sequence[float], level: float) -> float:
    """Return the quantile `level` of a distribution of lengths, in tokens, at least 1.

    Args:
        mass: Probability of each bin, not empty. Within a bin, lengths are spread evenly on a log scale.
    """
    below, index = 0.0, 0
    for index, share in enumerate(mass):  # noqa: B007 (used after the loop)
        if below + share >= level:
            break
        below += share
    first = LENGTH_EDGES[index]
    end = LENGTH_EDGES[index + 1] if index + 1 < len(LENGTH_EDGES) else first * math.sqrt(2)
    if end - first <= 1 or not mass[index]:
        return float(first)
    return float(first * (end / first) ** min(1.0, max(0.0, (level - below) / mass[index])))


class Forecast(NamedTuple):
    """Predicted output length of a request, made before its first token.

    Attributes:
        tokens: Expected number of output tokens in total, at least 1.
        mass: Probability of each bin of `LENGTH_EDGES` from the first, without trailing zeros; empty if unknown.
    """

    tokens: float
    source: str
    mass: tuple[float, ...] = ()
