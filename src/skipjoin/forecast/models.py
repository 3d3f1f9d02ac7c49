from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from skipjoin.forecast.encode import FEATURES, Hashed
from skipjoin.forecast.head import REPLAYED, Example, Head
from skipjoin.forecast.index import Found, VectorIndex
from skipjoin.forecast.mass import BINS, EDGES, Array, likelihood, mass_of
from skipjoin.forecast.prior import Prior

# Number of similar prompts to search.
NEIGHBORS = 24
# A neighbor weighs exp((similarity - 1) / _WARMTH); the prior weighs like this many identical prompts.
_WARMTH, _PRIOR_WEIGHT = 0.15, 0.3


def neighbors_mass(found: Found, prior: Array) -> Array:
    weights = np.exp((found.similarity - 1.0) / _WARMTH)
    ends = np.searchsorted(EDGES, found.tokens, side="right") - 1
    left = np.bincount(ends, weights, BINS)
    ended = np.bincount(ends, weights * found.exact, BINS)
    reached = np.cumsum(left[::-1])[::-1] - left + ended
    return mass_of((ended + _PRIOR_WEIGHT * prior) / (reached + _PRIOR_WEIGHT))


class Prompt(NamedTuple):
    features: Hashed
    vector: Array
    tokens: int


class Guess(NamedTuple):
    mass: Array
    source: str
    parts: tuple[Array, ...] = ()
    tokens: float | None = None


class Model(Protocol):
    name: str

    def guess(self, prompt: Prompt, prior: Prior) -> Guess: ...

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        """Learn that the predicted output ended after `tokens` tokens, in bin `end`; not `exact` if it was cut off."""

    def state(self) -> dict[str, Array]:
        return {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Restore the arrays of `state`, or raise ValueError or KeyError if they are not of this model."""
        return


# Minimum learning rate of the mixture, and minimum share of each component.
_MIXING, _MIN_SHARE = 0.01, 0.01


class Learned:
    """Mixture of prior, similar prompts and linear head, weighted by their recent likelihoods."""

    name = "learned"

    def __init__(self, index: VectorIndex, replayed: int = REPLAYED) -> None:
        self._index = index
        self._head = Head(FEATURES, replayed)
        self._shares: Array = np.full(3, 1 / 3)
        self._learned = 0

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        near = neighbors_mass(self._index.search(prompt.vector, NEIGHBORS), prior.hazards())
        head = self._head.mass(prompt.features.ids, prompt.features.weights)
        parts = np.stack([prior.mass(), near, head])
        return Guess(self._shares @ parts, self.name, tuple(parts))

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        self._mix(np.array([likelihood(part, end, exact) for part in guess.parts]))
        self._head.learn(Example(prompt.features.ids, prompt.features.weights, end, exact))
        self._index.add(prompt.vector, tokens, exact)

    def _mix(self, found: Array) -> None:
        self._learned += 1
        step = max(_MIXING, 1.0 / (self._learned + 2))
        shares = self._shares * (1 - step + step * found / (self._shares @ found))
        shares = np.maximum(shares, _MIN_SHARE)
        self._shares = shares / shares.sum()

    def __len__(self) -> int:
        return len(self._index)

    def state(self) -> dict[str, Array]:
        return (
            {"shares": self._shares, "learned": np.array([self._learned])}
            | prefixed("head", self._head.state())
            | prefixed("index", self._index.state())
        )

    def restore(self, state: Mapping[str, Array]) -> None:
        self._shares, self._learned = state["shares"], int(state["learned"][0])
        self._head.restore(part_of(state, "head"))
        self._index.restore(part_of(state, "index"))


def prefixed(name: str, state: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{name}.{key}": value for key, value in state.items()}


def part_of(state: Mapping[str, Array], name: str) -> dict[str, Array]:
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


class PriorOnly(Model):
    name = "prior"

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        return Guess(prior.mass(), self.name)

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None: ...
