from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from skipjoin.core.step import StepShape
from skipjoin.policies.cost import STEP_TERMS, LinearCost

# Cost models divide by their floor.
_MIN_S = 1e-6

Array = NDArray[np.float64]

# Rounds of iteratively reweighted least squares; the coefficients converge in about ten.
_ROUNDS = 15
# Relative errors below this have equal weight: two runs of the same step differ by as much.
_RESOLUTION = 0.01


# `fit_cost` searches for the steps that are bound by reading the weights. It starts from the steps with at most this
# many tokens (none; typical of CPUs; typical of GPUs) and iterates at most `_TURNS` times.
_HIDDEN_TOKENS = (0, 6, 12, 24, 64, 256)
_TURNS = 6


def fit_cost(
    shapes: Sequence[StepShape], seconds: Sequence[float], *, expert_part: float = 0.0, expert_use: float = 0.0
) -> LinearCost:
    experts = {"expert_part": expert_part, "expert_use": expert_use}
    read_share = LinearCost(1.0, 0.0, **experts).read_share
    read = np.array([read_share(shape.prefill + shape.decodes) for shape in shapes])
    counts, times = np.array([(1, *shape) for shape in shapes], dtype=np.float64), np.array(seconds)
    tokens = counts[:, 1] + counts[:, 3]
    candidates = []
    for most in _HIDDEN_TOKENS:
        hidden = tokens <= most
        for _ in range(_TURNS):
            # In weight-bound steps, tokens cost nothing and the last term counts as far as weights are read.
            features = np.column_stack([counts, hidden * read])
            features[np.ix_(hidden, np.array((1, 3)))] = 0
            terms = fit_times(features, times)
            now_hidden = terms[1] * counts[:, 1] + terms[3] * counts[:, 3] < terms[5] * read
            if (now_hidden == hidden).all():
                break
            hidden = now_hidden
        terms[0] = max(terms[0], _MIN_S)
        cost = LinearCost(**dict(zip(STEP_TERMS, terms.tolist(), strict=True)), **experts)
        candidates.append((sum(cost_errors(cost, shapes, seconds)), most, cost))
    return min(candidates)[2]


def cost_errors(cost: LinearCost, shapes: Sequence[StepShape], seconds: Sequence[float]) -> list[float]:
    return [abs(cost.step(shape) / time - 1) for shape, time in zip(shapes, seconds, strict=True)]


def fit_times(features: Array, seconds: Array) -> Array:
    """Fit nonnegative coefficients by the sum of absolute relative errors, so that outliers have little weight."""
    relative = features / seconds[:, None]
    weights = np.ones(len(seconds))
    coefficients = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        coefficients = _least_squares(relative * root[:, None], root)
        weights = 1 / np.maximum(np.abs(relative @ coefficients - 1), _RESOLUTION)
    return coefficients


def _least_squares(matrix: Array, target: Array) -> Array:
    # Column magnitudes differ by a factor of up to a million.
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
