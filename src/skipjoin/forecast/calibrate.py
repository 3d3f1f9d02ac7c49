"""Online calibration: what a forecast says happens in 80 % of all cases, happens in 80 % of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from skipjoin.forecast.mass import Array

# Requests that the calibration is taken from, and after how many it is taken again. As long as there are fewer than
# twice as many, it is the later half of them: the first ones were predicted by a model that knew little.
_REMEMBERED, _EVERY = 2000, 50
# Groups of prompts of similar lengths, each calibrated for itself.
_GROUPS = 4
# Levels that are corrected; what lies between is interpolated.
_LEVELS = np.array([0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0])
# As much as so many requests that confirm the forecasts as they are.
_TRUST = 40


class Calibrator:
    """Maps cumulated probabilities to the shares of past requests, with prompts of a similar length, whose lengths lay
    below them. For requests that were cut off, Kaplan and Meier's estimate fills in what is not known."""

    def __init__(self) -> None:
        # Prompt tokens, cumulated probability of the length by the uncorrected forecast, whether it ended by itself.
        self._seen: Array = np.zeros((_REMEMBERED, 3))
        self._count = 0
        self._borders: Array = np.zeros(_GROUPS - 1)
        self._places: Array = np.tile(_LEVELS, (_GROUPS, 1))

    def apply(self, mass: Array, prompt_tokens: int) -> Array:
        """The distribution with its probabilities corrected."""
        group = int(np.searchsorted(self._borders, prompt_tokens))
        below = np.interp(np.minimum(np.cumsum(mass), 1.0), self._places[group], _LEVELS)
        below[-1] = 1.0
        return np.diff(below, prepend=0.0)

    def learn(self, prompt_tokens: int, place: float, exact: bool) -> None:
        """The length of an output lay at `place`, in (0, 1), of its uncorrected forecast; not exact: above it."""
        self._seen[self._count % _REMEMBERED] = prompt_tokens, place, exact
        self._count += 1
        if self._count % _EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        latest = np.arange(max(self._count // 2, self._count - _REMEMBERED), self._count)
        seen = self._seen[latest % _REMEMBERED]
        self._borders = np.quantile(seen[:, 0], np.arange(1, _GROUPS) / _GROUPS)
        groups = np.searchsorted(self._borders, seen[:, 0])
        for group in range(_GROUPS):
            self._places[group] = _places(seen[groups == group])

    def state(self) -> dict[str, Array]:
        """The arrays to keep."""
        return {
            "seen": self._seen.copy(),
            "count": np.array([self._count]),
            "borders": self._borders,
            "places": self._places.copy(),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take the arrays of `state`. Raises ValueError or KeyError if they are of another size."""
        if state["seen"].shape != self._seen.shape or state["places"].shape != self._places.shape:
            raise ValueError("a calibration of another size")
        self._seen, self._places, self._borders = (state[name].copy() for name in ("seen", "places", "borders"))
        self._count = int(state["count"][0])


def _places(seen: Array) -> Array:
    """The uncorrected probabilities below which the share `_LEVELS` of the requests `seen` lay."""
    order = seen[np.argsort(seen[:, 1])]
    at_risk = np.arange(len(order), 0, -1)
    below = 1.0 - np.cumprod(1.0 - order[:, 2] / at_risk)
    # Where all that is left was cut off, nothing is known but that it is above.
    known = np.concatenate([[0.0], below, [1.0]])
    spots = np.concatenate([[0.0], order[:, 1], [1.0]])
    kept = np.concatenate([[True], np.diff(known) > 0])
    wanted = np.interp(_LEVELS, known[kept], spots[kept])
    trust = _TRUST / (_TRUST + len(order))
    return np.asarray(trust * _LEVELS + (1 - trust) * wanted)
