"""Distributions of output lengths: float64 arrays of probabilities over the bins of `LENGTH_EDGES`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipjoin.core.forecast import LENGTH_EDGES, Forecast, length_bin

Array = NDArray[Any]

BINS = len(LENGTH_EDGES)
EDGES: Array = np.array(LENGTH_EDGES, dtype=np.float64)
# The last bin is unbounded; it is treated as half an octave like the others.
_ENDS: Array = np.append(EDGES[1:], EDGES[-1] * math.sqrt(2))
_LOG_EDGES, _LOG_ENDS = np.log(EDGES), np.log(_ENDS)
# Geometric middle of each bin; bins of one length have that length.
LOG_MIDDLES: Array = np.where(_ENDS - EDGES <= 1, _LOG_EDGES, (_LOG_EDGES + _LOG_ENDS) / 2)
MIDDLES: Array = np.exp(LOG_MIDDLES)
_LEAST = 1e-9


def mass_of(hazards: Array) -> Array:
    """Return the distribution with these hazards, the probabilities to end in a bin once it is reached."""
    reached = np.concatenate(([1.0], np.cumprod(1.0 - hazards[:-1])))
    found = reached * hazards
    found[-1] = reached[-1]
    return found


def hazards_of(mass: Array) -> Array:
    reached = np.cumsum(mass[::-1])[::-1]
    return np.asarray(np.clip(mass / np.maximum(reached, 1e-300), _LEAST, 1 - _LEAST))


def likelihood(mass: Array, end: int, exact: bool) -> float:
    """Return the probability of ending in bin `end` or, if not `exact`, of reaching it."""
    return max(float(mass[end] if exact else mass[end:].sum()), _LEAST)


def position(mass: Array, tokens: int) -> float:
    """Return the probability of a shorter length plus half of that of `tokens` itself."""
    end = length_bin(tokens)
    width = _ENDS[end] - EDGES[end]
    share = 0.5 if width <= 1 else math.log(tokens + 0.5 - (tokens == EDGES[end]) * 0.5) - _LOG_EDGES[end]
    if width > 1:
        share = min(1.0, share / (_LOG_ENDS[end] - _LOG_EDGES[end]))
    return float(mass[:end].sum() + share * mass[end])


def capped(mass: Array, most: int, source: str, tokens: float | None = None) -> Forecast:
    """Return a forecast. Its default, the mean, orders pairs as well as the median and correlates better."""
    last = length_bin(most)
    kept = mass[: last + 1].copy()
    kept[last] += mass[last + 1 :].sum()
    kept /= kept.sum()
    expected = mean(mass, most) if tokens is None else min(max(tokens, 1.0), float(most))
    return Forecast(expected, source, tuple(np.trim_zeros(kept, "b").tolist()))


def mean(mass: Array, most: int) -> float:
    # Probabilities may not sum exactly to 1.
    return min(max(float(mass @ np.minimum(MIDDLES, most)), 1.0), float(most))
