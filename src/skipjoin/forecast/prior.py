"""What is expected of a request of which nothing is known: the survival curve of those that ended of late."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from skipjoin.forecast.mass import BINS, LOG_MIDDLES, Array, hazards_of, mass_of

# Weight that what was counted keeps when another request is: the last few thousand count.
_KEPT = 0.9995
# Before anything was learnt: half of the outputs are shorter than 128 tokens, two thirds within a factor of 3.
_FIRST_GUESS, _FIRST_SPREAD = 128.0, 3.0
# How many requests the first guess weighs as much as, in each bin.
_FIRST_WEIGHT = 2.0


def first_guess() -> Array:
    """A lognormal distribution over the bins."""
    away = (LOG_MIDDLES - np.log(_FIRST_GUESS)) / np.log(_FIRST_SPREAD)
    mass: Array = np.exp(-0.5 * away**2)
    return np.asarray(mass / mass.sum())


class Prior:
    """An online Kaplan-Meier estimate over the bins, with decay: in each bin, how many requests ended, of how many that
    got past its start and did not leave it in another way."""

    def __init__(self, first: Array | None = None) -> None:
        """Args:
        first: the hazards that are expected before anything is learned; None: those of `first_guess`.
        """
        self._first = _FIRST_HAZARDS if first is None else first
        self._reached: Array = np.full(BINS, _FIRST_WEIGHT)
        self._ended: Array = _FIRST_WEIGHT * self._first

    @property
    def requests(self) -> float:
        """Requests that were learned from, of which older ones count less."""
        return float(self._reached[0]) - _FIRST_WEIGHT

    def hazards(self) -> Array:
        """The probability to end in each bin once it is reached."""
        return np.asarray(self._ended / self._reached)

    def mass(self) -> Array:
        """The distribution of lengths."""
        return mass_of(self.hazards())

    def learn(self, end: int, exact: bool) -> None:
        """A request ended in bin `end`; not exact: it was cut off there, and would have gone on."""
        self._reached *= _KEPT
        self._ended *= _KEPT
        self._reached[: end + exact] += 1.0
        self._ended[end] += exact
        self._regress()

    def _regress(self) -> None:
        """Keep the weight of the first guess: bins that are never reached keep its hazards."""
        lost = (1 - _KEPT) * _FIRST_WEIGHT
        self._reached += lost
        self._ended += lost * self._first

    def state(self) -> dict[str, Array]:
        """The arrays to keep."""
        return {"reached": self._reached.copy(), "ended": self._ended.copy()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take the arrays of `state`."""
        self._reached, self._ended = state["reached"].copy(), state["ended"].copy()


_FIRST_HAZARDS = hazards_of(first_guess())
