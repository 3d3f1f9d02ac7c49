from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from skipjoin.forecast.mass import BINS, LOG_MIDDLES, Array, hazards_of, mass_of

# Decay of the counts per request: the last few thousand count.
_KEPT = 0.9995
# First guess: half of the outputs are shorter than 128 tokens, and two thirds are within a factor of 3.
_FIRST_GUESS, _FIRST_SPREAD = 128.0, 3.0
# Weight of the first guess in each bin, in requests.
_FIRST_WEIGHT = 2.0


def first_guess() -> Array:
    distance = (LOG_MIDDLES - np.log(_FIRST_GUESS)) / np.log(_FIRST_SPREAD)
    mass: Array = np.exp(-0.5 * distance**2)
    return np.asarray(mass / mass.sum())


class Prior:
    """Online Kaplan-Meier estimate over the bins with exponential decay, started from the hazards `first`."""

    def __init__(self, first: Array | None = None) -> None:
        self._first = _FIRST_HAZARDS if first is None else first
        self._reached: Array = np.full(BINS, _FIRST_WEIGHT)
        self._ended: Array = _FIRST_WEIGHT * self._first

    @property
    def requests(self) -> float:
        return float(self._reached[0]) - _FIRST_WEIGHT

    def hazards(self) -> Array:
        return np.asarray(self._ended / self._reached)

    def mass(self) -> Array:
        return mass_of(self.hazards())

    def learn(self, end: int, exact: bool) -> None:
        self._reached *= _KEPT
        self._ended *= _KEPT
        self._reached[: end + exact] += 1.0
        self._ended[end] += exact
        self._regress()

    def _regress(self) -> None:
        lost = (1 - _KEPT) * _FIRST_WEIGHT
        self._reached += lost
        self._ended += lost * self._first

    def state(self) -> dict[str, Array]:
        return {"reached": self._reached.copy(), "ended": self._ended.copy()}

    def restore(self, state: Mapping[str, Array]) -> None:
        self._reached, self._ended = state["reached"].copy(), state["ended"].copy()


_FIRST_HAZARDS = hazards_of(first_guess())
