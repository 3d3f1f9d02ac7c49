"""ALISE's forecaster (section 3.1, Algorithm 1): similar prompts of the past, or a perceptron where there are none."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from skipjoin.forecast.index import Found, VectorIndex
from skipjoin.forecast.mass import BINS, LOG_MIDDLES, Array
from skipjoin.forecast.mlp import Estimate, Mlp
from skipjoin.forecast.models import Guess, Prompt, part_of, prefixed
from skipjoin.forecast.prior import Prior

# The paper gives neither k nor the threshold s0. Of k in 8, 16, 32 and s0 in 0.2, 0.35, 0.5, 0.65 these order requests
# best on Alpaca's and ShareGPT's prompts with hashed tokens.
TOP_K, THRESHOLD = 16, 0.2
# The narrowest deviation of the logarithm that a distribution around an estimate has.
_LEAST_SPREAD = 0.2


class Alise:
    """The weighted mean of the lengths of the `TOP_K` most similar prompts with a similarity of at least `THRESHOLD`,
    else the perceptron's estimate. Weights are similarities that are normalized to sum to one: Algorithm 1 prints them
    without that, and its sum would grow with k.

    The paper has a mean and no distribution. Here it is lognormal around the estimate, with the deviation of the
    neighbours or of the perceptron's errors; calibration widens it. The database is updated with true lengths only.
    """

    name = "alise"

    def __init__(self, index: VectorIndex, width: int) -> None:
        self._index, self._mlp = index, Mlp(width)

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        """See `Model`."""
        vector = prompt.vector.astype(np.float32)
        found = self._index.search(vector, TOP_K)
        similar = found.similarity >= THRESHOLD
        if similar.any():
            return _guess(_weighted(found, similar), "alise-similar")
        return _guess(self._mlp.estimate(vector), "alise-mlp")

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        """See `Model`."""
        self._mlp.learn(prompt.vector.astype(np.float32), tokens, exact)
        if exact:
            self._index.add(prompt.vector, tokens, exact)

    def __len__(self) -> int:
        """Past requests that it searches."""
        return len(self._index)

    def state(self) -> dict[str, Array]:
        """See `Model`."""
        return prefixed("mlp", self._mlp.state()) | prefixed("index", self._index.state())

    def restore(self, state: Mapping[str, Array]) -> None:
        """See `Model`."""
        self._mlp.restore(part_of(state, "mlp"))
        self._index.restore(part_of(state, "index"))


def _weighted(found: Found, similar: Array) -> Estimate:
    """The mean length of similar prompts, as a logarithm, and the deviation of their logarithms."""
    weights = found.similarity[similar] / found.similarity[similar].sum()
    lengths = found.tokens[similar].astype(np.float64)
    logs = np.log(lengths)
    return Estimate(float(np.log(weights @ lengths)), float(np.sqrt(weights @ (logs - weights @ logs) ** 2)))


def _guess(estimate: Estimate, source: str) -> Guess:
    """A lognormal distribution around the estimate, with a little for every other length."""
    mass = np.exp(-0.5 * ((LOG_MIDDLES - estimate.log_tokens) / max(estimate.spread, _LEAST_SPREAD)) ** 2)
    return Guess((mass + 1e-4) / (mass.sum() + 1e-4 * BINS), source, tokens=float(np.exp(estimate.log_tokens)))
