from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from skipjoin.core.forecast import LENGTH_EDGES

# The first bins of `LENGTH_EDGES` hold one length each and are merged, because a request would leave them at every
# step. The last bins are beyond all contexts.
_MERGED, _LAST = 3, 32
# Lower edges in tokens of the bins that hazards are counted in. Bin i ends before BIN_EDGES[i + 1]; the last one is
# unbounded.
BIN_EDGES: tuple[int, ...] = (1, *LENGTH_EDGES[_MERGED:_LAST])
BINS = len(BIN_EDGES)
_ENDS = (*BIN_EDGES[1:], 2 * BIN_EDGES[-1])
# Typical length in each bin, and the number of its lengths.
BIN_MIDDLES: tuple[float, ...] = tuple(
    math.sqrt(first * (end - 1)) for first, end in zip(BIN_EDGES, _ENDS, strict=True)
)
BIN_WIDTHS: tuple[int, ...] = tuple(end - first for first, end in zip(BIN_EDGES, _ENDS, strict=True))
# Factor by which a bin's earlier counts shrink with each request that leaves it: about the last 500 count.
_KEPT = 0.998
_LEAST = 1e-12


def bin_of(tokens: float) -> int:
    return max(0, bisect_right(BIN_EDGES, tokens) - 1)


def hazards_of(mass: Sequence[float]) -> list[float]:
    """Return the hazard of each bin of a distribution. Bins that are never reached get 1."""
    remaining, found = math.fsum(mass), []
    for share in mass:
        found.append(min(1.0, share / remaining) if remaining > _LEAST else 1.0)
        remaining -= share
    return found


def merged(mass: Sequence[float]) -> list[float]:
    """Convert a distribution over `LENGTH_EDGES` to the coarser bins of this module."""
    found = [0.0] * BINS
    for place, share in enumerate(mass):
        found[bin_of(LENGTH_EDGES[place])] += share
    return found


class Hazards:
    """Counts of requests by the bins that they leave, either to the next bin or because they end.

    Unlike an estimate at the end of requests, which sees short ones first, it does not depend on which ones are
    favored.
    """

    __slots__ = ("ended", "reached")

    def __init__(self, bins: int = BINS) -> None:
        self.reached = [0.0] * bins
        self.ended = [0.0] * bins

    def note(self, place: int, *, ended: bool) -> None:
        self.reached[place] = self.reached[place] * _KEPT + 1.0
        self.ended[place] = self.ended[place] * _KEPT + ended

    def estimate(self, base: Sequence[float], weight: float) -> list[float]:
        """Return the hazard of each bin, with `base` as a prior that weighs as much as `weight` requests."""
        return [
            (ended + weight * prior) / (reached + weight)
            for ended, reached, prior in zip(self.ended, self.reached, base, strict=True)
        ]
