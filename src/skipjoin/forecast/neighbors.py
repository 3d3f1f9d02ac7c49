from __future__ import annotations

import numpy as np

from skipjoin.forecast.index import Found
from skipjoin.forecast.mass import BINS, EDGES, Array, mass_of

# Number of similar prompts to search.
NEIGHBORS = 24
# A neighbor weighs exp((similarity - 1) / _WARMTH); the prior weighs like this many identical prompts.
_WARMTH, _PRIOR_WEIGHT = 0.15, 0.3


def neighbors_mass(found: Found, prior: Array) -> Array:
    weights = np.exp((found.similarity - 1.0) / _WARMTH)
    ends = np.searchsorted(EDGES, found.tokens, side="right") - 1
    left = np.bincount(ends, weights, BINS)
    ended = np.bincount(ends, weights * found.exact, BINS)
    reached = np.cumsum(left[::-1])[::-1] - left + ended
    return mass_of((ended + _PRIOR_WEIGHT * prior) / (reached + _PRIOR_WEIGHT))
