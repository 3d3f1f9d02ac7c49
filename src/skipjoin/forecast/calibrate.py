from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from skipjoin.forecast.mass import Array

# Number of requests in a fit, and the fit interval. Before there are twice as many, only the later half is used, as the
# first ones were predicted by a nearly untrained model.
_REMEMBERED, _EVERY = 2000, 50
# Number of groups by prompt length, each calibrated separately.
_GROUPS = 4
# Calibrated levels; others are interpolated.
_LEVELS = np.array([0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0])
# Weight of the identity map, in requests.
_TRUST = 40


class Calibrator:
    """Maps cumulative probabilities to shares of past requests, of which those cut off are censored (Kaplan-Meier)."""

    def __init__(self) -> None:
        # Columns: prompt tokens, cumulative probability of the length in the uncalibrated forecast, whether the length
        # is exact.
        self._seen: Array = np.zeros((_REMEMBERED, 3))
        self._count = 0
        self._borders: Array = np.zeros(_GROUPS - 1)
        self._positions: Array = np.tile(_LEVELS, (_GROUPS, 1))

    def apply(self, mass: Array, prompt_tokens: int) -> Array:
        group = int(np.searchsorted(self._borders, prompt_tokens))
        below = np.interp(np.minimum(np.cumsum(mass), 1.0), self._positions[group], _LEVELS)
        below[-1] = 1.0
        return np.diff(below, prepend=0.0)

    def learn(self, prompt_tokens: int, position: float, exact: bool) -> None:
        """Learn the position in (0, 1) of a length in its uncalibrated forecast; not `exact` if it was cut off."""
        self._seen[self._count % _REMEMBERED] = prompt_tokens, position, exact
        self._count += 1
        if self._count % _EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        latest = np.arange(max(self._count // 2, self._count - _REMEMBERED), self._count)
        seen = self._seen[latest % _REMEMBERED]
        self._borders = np.quantile(seen[:, 0], np.arange(1, _GROUPS) / _GROUPS)
        groups = np.searchsorted(self._borders, seen[:, 0])
        for group in range(_GROUPS):
            self._positions[group] = _positions(seen[groups == group])

    def state(self) -> dict[str, Array]:
        return {
            "seen": self._seen.copy(),
            "count": np.array([self._count]),
            "borders": self._borders,
            "places": self._positions.copy(),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        if state["seen"].shape != self._seen.shape or state["places"].shape != self._positions.shape:
            raise ValueError("a calibration of another size")
        self._seen, self._positions, self._borders = (state[name].copy() for name in ("seen", "places", "borders"))
        self._count = int(state["count"][0])


def _positions(seen: Array) -> Array:
    order = seen[np.argsort(seen[:, 1])]
    at_risk = np.arange(len(order), 0, -1)
    below = 1.0 - np.cumprod(1.0 - order[:, 2] / at_risk)
    # If all remaining requests were cut off, their lengths are only known to be above.
    known = np.concatenate([[0.0], below, [1.0]])
    spots = np.concatenate([[0.0], order[:, 1], [1.0]])
    kept = np.concatenate([[True], np.diff(known) > 0])
    wanted = np.interp(_LEVELS, known[kept], spots[kept])
    trust = _TRUST / (_TRUST + len(order))
    return np.asarray(trust * _LEVELS + (1 - trust) * wanted)
