"""Fitting step costs to measured times: coefficients of at least 0, least relative error, robust to outliers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from skipjoin.core.step import StepShape
from skipjoin.policies.cost import STEP_TERMS, LinearCost

# A cost model divides by its floor.
_LEAST_S = 1e-6

Array = NDArray[np.float64]

# Rounds of reweighting towards the least sum of absolute relative errors; they settle in about ten.
_ROUNDS = 15
# Relative errors below this weigh alike: that well nobody can tell two runs of one step apart.
_RESOLUTION = 0.01


# The search for which steps the weights take longest of begins at those of at most so many tokens (none, what CPUs
# have, what GPUs have), and goes back and forth so often.
_HIDDEN_TOKENS = (0, 6, 12, 24, 64, 256)
_TURNS = 6


def fit_cost(shapes: Sequence[StepShape], seconds: Sequence[float]) -> LinearCost:
    """The cost model, transfers aside, that says best how long steps of these shapes took."""
    counts, times = np.array([(1, *shape) for shape in shapes], dtype=np.float64), np.array(seconds)
    tokens = counts[:, 1] + counts[:, 3]
    candidates = []
    for most in _HIDDEN_TOKENS:
        hidden = tokens <= most
        for _ in range(_TURNS):
            # Where reading the weights takes longest, tokens count nothing and the last term once.
            features = np.column_stack([counts, hidden])
            features[np.ix_(hidden, (1, 3))] = 0
            terms = fit_times(features, times)
            now_hidden = terms[1] * counts[:, 1] + terms[3] * counts[:, 3] < terms[5]
            if (now_hidden == hidden).all():
                break
            hidden = now_hidden
        terms[0] = max(terms[0], _LEAST_S)
        cost = LinearCost(**dict(zip(STEP_TERMS, terms.tolist(), strict=True)))
        candidates.append((sum(cost_errors(cost, shapes, seconds)), most, cost))
    return min(candidates)[2]


def cost_errors(cost: LinearCost, shapes: Sequence[StepShape], seconds: Sequence[float]) -> list[float]:
    """Absolute errors of the cost model, relative to the measured times."""
    return [abs(cost.step(shape) / time - 1) for shape, time in zip(shapes, seconds, strict=True)]


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


def _least_squares(matrix: Array, target: Array) -> Array:
    """The least-squares solution without negative entries.

    The solution's support is one of the subsets of columns whose unconstrained solution has no negative entry, and
    the best of those: with 6 columns, trying all 63 is exact and takes a millisecond or two.
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
