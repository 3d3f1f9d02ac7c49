from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import NamedTuple

import numpy as np

from skipjoin.forecast.mass import BINS, Array, hazards_of, mass_of
from skipjoin.forecast.prior import first_guess

# Cosines by which a feature shapes the hazard curve; smooth curves are learned from few requests.
_CURVES = 4
# Bins that the cosines span: up to 2 ** 13 tokens.
_STRETCH = 26
_RATE = 0.1
_FIRST_SQUARES, _FIRST_BIAS_SQUARES = 1e-2, 1e-1
# Size of the replay buffer, and replays per new request.
REPLAYED, _REPLAYS = 2000, 2


class Example(NamedTuple):
    ids: Array
    weights: Array
    end: int
    exact: bool


class Head:
    """Hazard model logit hazard(bin | x) = bias(bin) + curves(bin) . W x, trained with AdaGrad.

    The loss is the negative log likelihood of each end. A request that was cut off counts with the bins that it passed.
    """

    def __init__(self, features: int, replayed: int = REPLAYED) -> None:
        at = np.minimum((np.arange(BINS) + 0.5) / _STRETCH, 1.0)
        self._curves = np.cos(np.pi * np.arange(_CURVES) * at[:, None]).astype(np.float32)
        self._weights: Array = np.zeros((features, _CURVES), np.float32)
        self._squares: Array = np.full((features, _CURVES), _FIRST_SQUARES, np.float32)
        first = hazards_of(first_guess())
        self._bias: Array = np.log(first) - np.log1p(-first)
        self._bias_squares: Array = np.full(BINS, _FIRST_BIAS_SQUARES)
        self._past: list[Example] = []
        self._replayed = replayed
        self._learned = 0
        self._drawn = Random(0)  # deterministic

    def mass(self, ids: Array, weights: Array) -> Array:
        return mass_of(self._hazards(ids, weights))

    def _hazards(self, ids: Array, weights: Array) -> Array:
        logits = self._bias + self._curves @ (weights @ self._weights[ids])
        return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -20.0, 20.0))))

    def learn(self, example: Example) -> None:
        self._step(example)
        self._keep(example)
        for _ in range(_REPLAYS):
            self._step(self._past[self._drawn.randrange(len(self._past))])

    def _keep(self, example: Example) -> None:
        if len(self._past) < self._replayed:
            self._past.append(example)
        else:
            self._past[self._learned % self._replayed] = example
        self._learned += 1

    def _step(self, example: Example) -> None:
        error = self._hazards(example.ids, example.weights)
        error[example.end + example.exact :] = 0.0
        if example.exact:
            error[example.end] -= 1.0
        self._bias_squares += error * error
        self._bias -= _RATE * error / np.sqrt(self._bias_squares)
        slope = np.outer(example.weights, error @ self._curves).astype(np.float32)
        self._squares[example.ids] += slope * slope
        self._weights[example.ids] -= _RATE * slope / np.sqrt(self._squares[example.ids])

    def state(self) -> dict[str, Array]:
        names = ("weights", "squares", "bias", "bias_squares")
        return {name: getattr(self, f"_{name}").copy() for name in names}

    def restore(self, state: Mapping[str, Array]) -> None:
        if state["weights"].shape != self._weights.shape:
            raise ValueError(f"weights of {state['weights'].shape}, not {self._weights.shape}")
        self._weights, self._squares = state["weights"].copy(), state["squares"].copy()
        self._bias, self._bias_squares = state["bias"].copy(), state["bias_squares"].copy()
