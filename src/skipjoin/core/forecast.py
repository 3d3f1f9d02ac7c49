"""What is expected of a request's output: data that travels with it. Nothing here predicts; see `skipjoin.forecast`."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

# Lower edges of the bins of output lengths, in tokens: half an octave wide, up to 2 ** 20. Bin i has the lengths from
# LENGTH_EDGES[i] up to, but not including, the next edge; the last bin has no end.
LENGTH_EDGES: tuple[int, ...] = tuple(sorted({round(2 ** (half / 2)) for half in range(41)}))


def length_bin(tokens: float) -> int:
    """The bin that a length of at least 1 token lies in."""
    return bisect_right(LENGTH_EDGES, tokens) - 1


class Forecast(NamedTuple):
    """The expected output length of a request, made before its first token.

    tokens: expected output tokens in all, at least 1. mass: the probability of each bin of `LENGTH_EDGES`, from the
    first, without the zeros at the end; empty: only `tokens` is known. source: what made it, for metrics and records.
    """

    tokens: float
    source: str
    mass: tuple[float, ...] = ()
