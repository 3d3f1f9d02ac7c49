"""From similar prompts to a distribution of lengths."""

from __future__ import annotations

import numpy as np

from skipjoin.forecast.index import Found
from skipjoin.forecast.mass import BINS, EDGES, Array, mass_of

# Similar prompts that are asked for.
NEIGHBOURS = 24
# How much a similarity counts: exp((similarity - 1) / _WARMTH). Of the prior, as much as of so many equal prompts.
_WARMTH, _PRIOR_WEIGHT = 0.15, 0.3


def neighbours_mass(found: Found, prior: Array) -> Array:
    """A Kaplan-Meier estimate over the bins, in which similar prompts count most and the prior's hazards fill what they
    leave open. prior: hazards."""
    weights = np.exp((found.similarity - 1.0) / _WARMTH)
    ends = np.searchsorted(EDGES, found.tokens, side="right") - 1
    left = np.bincount(ends, weights, BINS)
    ended = np.bincount(ends, weights * found.exact, BINS)
    reached = np.cumsum(left[::-1])[::-1] - left + ended
    return mass_of((ended + _PRIOR_WEIGHT * prior) / (reached + _PRIOR_WEIGHT))
