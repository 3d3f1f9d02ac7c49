"""A linear model of the hazards over the bins: how each feature of a prompt makes an output end earlier or later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from skipjoin.forecast.mass import BINS, Array, mass_of

# Every feature bends the curve of hazards by this many cosines: smooth curves are learnt from few requests.
_CURVES = 4
# The bins that the cosines stretch over: 2 to the power of 13 tokens.
_STRETCH = 26
_RATE = 0.1
_FIRST_SQUARES = 1e-2
# Requests kept to be learnt from again, and how many of them are with each new one.
_REPLAYED, _REPLAYS = 2000, 1
# A stride through them, prime to their number.
_STRIDE = 769


class Example(NamedTuple):
    """Sparse features (`ids`, `weights`, (n,) each), the logits of the hazards without them, and how it ended."""

    ids: Array
    weights: Array
    base: Array
    end: int
    exact: bool


class Head:
    """logit hazard(bin | x) = base(bin) + curves(bin) . W x, learnt with AdaGrad from the likelihood of each end, in
    which a request that was cut off counts with the bins that it got through."""

    def __init__(self, features: int) -> None:
        at = np.minimum((np.arange(BINS) + 0.5) / _STRETCH, 1.0)
        self._curves = np.cos(np.pi * np.arange(_CURVES) * at[:, None]).astype(np.float32)
        self._weights: Array = np.zeros((features, _CURVES), np.float32)
        self._squares: Array = np.full((features, _CURVES), _FIRST_SQUARES, np.float32)
        self._past: list[Example] = []
        self._learnt = 0

    def mass(self, ids: Array, weights: Array, base: Array) -> Array:
        """The distribution of lengths of a prompt with these features."""
        return mass_of(self._hazards(ids, weights, base))

    def _hazards(self, ids: Array, weights: Array, base: Array) -> Array:
        logits = base + self._curves @ (weights @ self._weights[ids])
        return np.asarray(1.0 / (1.0 + np.exp(-np.clip(logits, -20.0, 20.0))))

    def learn(self, example: Example) -> None:
        """Learn how a request ended, and again how some before it did."""
        self._step(example)
        self._keep(example)
        for replay in range(_REPLAYS):
            self._step(self._past[(self._learnt * _REPLAYS + replay) * _STRIDE % len(self._past)])

    def _keep(self, example: Example) -> None:
        if len(self._past) < _REPLAYED:
            self._past.append(example)
        else:
            self._past[self._learnt % _REPLAYED] = example
        self._learnt += 1

    def _step(self, example: Example) -> None:
        error = self._hazards(example.ids, example.weights, example.base)
        error[example.end + example.exact :] = 0.0
        if example.exact:
            error[example.end] -= 1.0
        slope = np.outer(example.weights, error @ self._curves).astype(np.float32)
        self._squares[example.ids] += slope * slope
        self._weights[example.ids] -= _RATE * slope / np.sqrt(self._squares[example.ids])

    def state(self) -> dict[str, Array]:
        """The arrays to keep; what is learnt from again is not."""
        return {"weights": self._weights.copy(), "squares": self._squares.copy()}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take the arrays of `state`. Raises ValueError or KeyError if they are not of this size."""
        if state["weights"].shape != self._weights.shape:
            raise ValueError(f"weights of {state['weights'].shape}, not {self._weights.shape}")
        self._weights, self._squares = state["weights"].copy(), state["squares"].copy()
