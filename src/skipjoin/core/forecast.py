"""What is expected of a request's output: data that travels with it. Nothing here predicts; see `skipjoin.forecast`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

# Lower edges of the bins of output lengths, in tokens: half an octave wide, up to 2 ** 20. Bin i has the lengths from
# LENGTH_EDGES[i] up to, but not including, the next edge; the last bin has no end.
LENGTH_EDGES: tuple[int, ...] = tuple(sorted({round(2 ** (half / 2)) for half in range(41)}))


def length_bin(tokens: float) -> int:
    """The bin that a length of at least 1 token lies in."""
    return bisect_right(LENGTH_EDGES, tokens) - 1


def length_quantile(mass: Sequence[float], level: float) -> float:
    """The length in tokens, at least 1, below which the share `level` of a distribution lies. mass: of each bin, not
    empty; within a bin lengths are spread evenly on a log scale."""
    below, index = 0.0, 0
    for index, share in enumerate(mass):  # noqa: B007 (read behind the loop)
        if below + share >= level:
            break
        below += share
    first = LENGTH_EDGES[index]
    end = LENGTH_EDGES[index + 1] if index + 1 < len(LENGTH_EDGES) else first * math.sqrt(2)
    if end - first <= 1 or not mass[index]:
        return float(first)
    return float(first * (end / first) ** min(1.0, max(0.0, (level - below) / mass[index])))


class Forecast(NamedTuple):
    """The expected output length of a request, made before its first token.

    tokens: expected output tokens in all, at least 1. mass: the probability of each bin of `LENGTH_EDGES`, from the
    first, without the zeros at the end; empty: only `tokens` is known. source: what made it, for metrics and records.
    """

    tokens: float
    source: str
    mass: tuple[float, ...] = ()
