"""ALISE's forecaster (section 3.1, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from skipjoin.forecast.index import Found, VectorIndex
from skipjoin.forecast.mass import BINS, LOG_MIDDLES, Array
from skipjoin.forecast.mlp import Estimate, Mlp
from skipjoin.forecast.models import Guess, Prompt, part_of, prefixed
from skipjoin.forecast.prior import Prior

# The paper gives neither k nor the threshold s0. Of k in 8, 16, 32 and s0 in 0.2, 0.35, 0.5, 0.65, these rank requests
# of Alpaca and ShareGPT best with hashed tokens.
TOP_K, THRESHOLD = 16, 0.2
# Minimum standard deviation of the log length.
_MIN_SPREAD = 0.2


class Alise:
    """Weighted mean length of the `TOP_K` most similar prompts above `THRESHOLD`, else the perceptron's estimate.

    Weights are normalized similarities, unlike in Algorithm 1, whose sum would grow with k. The distribution is
    lognormal, with the deviation of the neighbors or of the perceptron's errors, and calibration widens it. The index
    learns exact lengths only.
    """

    name = "alise"

    def __init__(self, index: VectorIndex, width: int) -> None:
        self._index, self._mlp = index, Mlp(width)

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        vector = prompt.vector.astype(np.float32)
        found = self._index.search(vector, TOP_K)
        similar = found.similarity >= THRESHOLD
        if similar.any():
            return _guess(_weighted(found, similar), "alise-similar")
        return _guess(self._mlp.estimate(vector), "alise-mlp")

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        self._mlp.learn(prompt.vector.astype(np.float32), tokens, exact)
        if exact:
            self._index.add(prompt.vector, tokens, exact)

    def __len__(self) -> int:
        return len(self._index)

    def state(self) -> dict[str, Array]:
        return prefixed("mlp", self._mlp.state()) | prefixed("index", self._index.state())

    def restore(self, state: Mapping[str, Array]) -> None:
        self._mlp.restore(part_of(state, "mlp"))
        self._index.restore(part_of(state, "index"))


def _weighted(found: Found, similar: Array) -> Estimate:
    weights = found.similarity[similar] / found.similarity[similar].sum()
    lengths = found.tokens[similar].astype(np.float64)
    logs = np.log(lengths)
    return Estimate(float(np.log(weights @ lengths)), float(np.sqrt(weights @ (logs - weights @ logs) ** 2)))


def _guess(estimate: Estimate, source: str) -> Guess:
    mass = np.exp(-0.5 * ((LOG_MIDDLES - estimate.log_tokens) / max(estimate.spread, _MIN_SPREAD)) ** 2)
    return Guess((mass + 1e-4) / (mass.sum() + 1e-4 * BINS), source, tokens=float(np.exp(estimate.log_tokens)))
