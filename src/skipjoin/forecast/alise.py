from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from skipjoin.forecast.index import Found, VectorIndex
from skipjoin.forecast.mass import BINS, LOG_MIDDLES, Array
from skipjoin.forecast.mlp import Estimate, Mlp
from skipjoin.forecast.models import Guess, Prompt, part_of, prefixed
from skipjoin.forecast.prior import Prior


class Tuning(NamedTuple):
    """What the paper leaves open."""

    neighbors: int  # the number k
    threshold: float  # the similarity s0 from which a neighbor counts
    share: float  # of neighbors in the log length, if there are any; the perceptron has the rest


# Without training. On a trace, `skipjoin predict train` chooses its own.
UNTRAINED = Tuning(16, 0.2, 1.0)
# Minimum standard deviation of the log length.
_MIN_SPREAD = 0.2


class Alise:
    """Weighted mean length of the k most similar prompts that are similar enough, else the perceptron's estimate.

    After training, both are blended, which orders requests better than either alone. Weights are normalized, unlike in
    Algorithm 1, whose sum grows with k. The distribution is lognormal, which calibration widens.
    """

    name = "alise"

    def __init__(self, index: VectorIndex, width: int) -> None:
        self._index, self._mlp, self._tuning = index, Mlp(width), UNTRAINED

    @property
    def entries(self) -> int:
        return self._index.entries

    def begin(self, decoder: Mlp, tuning: Tuning, vectors: Array, tokens: Array) -> None:
        self._mlp, self._tuning = decoder, tuning
        for vector, length in zip(vectors, tokens.tolist(), strict=True):
            self._index.add(vector, length, True)

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        vector = prompt.vector.astype(np.float32)
        found = self._index.search(vector, self._tuning.neighbors)
        similar = found.similarity >= self._tuning.threshold
        decoded = self._mlp.estimate(vector)
        if similar.any():
            return _guess(_blended(_weighted(found, similar), decoded, self._tuning.share), "alise-similar")
        return _guess(decoded, "alise-mlp")

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        self._mlp.learn(prompt.vector.astype(np.float32), tokens, exact)
        if exact:
            self._index.add(prompt.vector, tokens, exact)

    def __len__(self) -> int:
        return len(self._index)

    def state(self) -> dict[str, Array]:
        parts = prefixed("mlp", self._mlp.state()) | prefixed("index", self._index.state())
        return parts | {"tuning": np.array(self._tuning, np.float64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self._mlp.restore(part_of(state, "mlp"))
        self._index.restore(part_of(state, "index"))
        neighbors, threshold, share = state["tuning"].tolist()
        self._tuning = Tuning(int(neighbors), threshold, share)


def _weighted(found: Found, similar: Array) -> Estimate:
    weights = found.similarity[similar] / found.similarity[similar].sum()
    lengths = found.tokens[similar].astype(np.float64)
    logs = np.log(lengths)
    return Estimate(float(np.log(weights @ lengths)), float(np.sqrt(weights @ (logs - weights @ logs) ** 2)))


def _blended(left: Estimate, right: Estimate, share: float) -> Estimate:
    return Estimate(
        share * left.log_tokens + (1 - share) * right.log_tokens,
        math.sqrt(share * left.spread**2 + (1 - share) * right.spread**2),
    )


def _guess(estimate: Estimate, source: str) -> Guess:
    mass = np.exp(-0.5 * ((LOG_MIDDLES - estimate.log_tokens) / max(estimate.spread, _MIN_SPREAD)) ** 2)
    return Guess((mass + 1e-4) / (mass.sum() + 1e-4 * BINS), source, tokens=float(np.exp(estimate.log_tokens)))
