"""Fitting a linear cost to measured times: coefficients of at least 0, least relative error, robust to outliers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from skipjoin.core.step import StepShape

Array = NDArray[np.float64]

# Rounds of reweighting towards the least sum of absolute relative errors; they settle in about ten.
_ROUNDS = 15
# Relative errors below this weigh alike: that well nobody can tell two runs of one step apart.
_RESOLUTION = 0.01


def step_features(shapes: Sequence[StepShape]) -> Array:
    """[n, 5]: the counts that the terms of `LinearCost.step` multiply, in the order of its `STEP_TERMS`."""
    return np.array([(1, *shape) for shape in shapes], dtype=np.float64).reshape(len(shapes), 5)


def fit_times(features: Array, seconds: Array) -> Array:
    """Coefficients [k], none below 0, with `features` [n, k] @ coefficients close to `seconds` [n], all above 0.

    The sum of absolute errors relative to the measured times is least, so that short steps count as much as long
    ones and a few that were disturbed count little.
    """
    relative = features / seconds[:, None]
    weights = np.ones(len(seconds))
    coefficients = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        coefficients = _least_squares(relative * root[:, None], root)
        weights = 1 / np.maximum(np.abs(relative @ coefficients - 1), _RESOLUTION)
    return coefficients


def relative_errors(coefficients: Array, features: Array, seconds: Array) -> Array:
    """Absolute errors [n] of the coefficients, relative to the measured times."""
    return np.abs(features @ coefficients / seconds - 1)


def _least_squares(matrix: Array, target: Array) -> Array:
    """The least-squares solution without negative entries.

    The solution's support is one of the subsets of columns whose unconstrained solution has no negative entry, and
    the best of those: with 5 columns, trying all 31 is exact and takes a millisecond.
    """
    # Columns differ by the size of what they count, up to a million times.
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    scaled = matrix / scale
    best, best_error = np.zeros(matrix.shape[1]), float(target @ target)
    for size in range(1, matrix.shape[1] + 1):
        for columns in map(list, combinations(range(matrix.shape[1]), size)):
            part = scaled[:, columns]
            solution = np.linalg.lstsq(part, target)[0]
            error = float(np.sum((part @ solution - target) ** 2))
            if solution.min() >= 0 and error < best_error:
                best, best_error = np.zeros(matrix.shape[1]), error
                best[columns] = solution
    found: Array = best / scale
    return found
