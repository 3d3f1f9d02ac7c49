"""Models of output lengths, and what a `Forecaster` asks of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from skipjoin.forecast.encode import FEATURES, Hashed
from skipjoin.forecast.head import REPLAYED, Example, Head
from skipjoin.forecast.index import VectorIndex
from skipjoin.forecast.mass import Array, likelihood
from skipjoin.forecast.neighbours import NEIGHBOURS, neighbours_mass
from skipjoin.forecast.prior import Prior


class Prompt(NamedTuple):
    """What models see of a prompt: hashed features, the encoder's vector, and the number of tokens."""

    features: Hashed
    vector: Array
    tokens: int


class Guess(NamedTuple):
    """What a model says: a distribution over the bins, what it is made from, and what the model needs to learn.

    tokens: the length that it expects, if that is not the mean of the calibrated distribution.
    """

    mass: Array
    source: str
    parts: tuple[Array, ...] = ()
    tokens: float | None = None


class Model(Protocol):
    """Foresees output lengths from prompts and learns from those that ended."""

    name: str

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        """The distribution of the output's length."""
        ...

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        """The output that was guessed ended after `tokens` tokens, in bin `end`; not exact: it was cut off there."""
        ...

    def state(self) -> dict[str, Array]:
        """The arrays to keep."""
        ...

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take the arrays of `state`. Raises ValueError or KeyError if they are none of this model."""
        ...


# Share of a part's weight in the mixture that one more request decides, and the least that each part keeps.
_MIXING, _LEAST_SHARE = 0.01, 0.01


class Learnt:
    """Prior, similar prompts and linear head, mixed by how likely each of them found the lengths of late."""

    name = "learnt"

    def __init__(self, index: VectorIndex, replayed: int = REPLAYED) -> None:
        """Args:
        replayed: how many past requests the head keeps to learn from them again.
        """
        self._index = index
        self._head = Head(FEATURES, replayed)
        self._shares: Array = np.full(3, 1 / 3)
        self._learnt = 0

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        """See `Model`."""
        near = neighbours_mass(self._index.search(prompt.vector, NEIGHBOURS), prior.hazards())
        head = self._head.mass(prompt.features.ids, prompt.features.weights)
        parts = np.stack([prior.mass(), near, head])
        return Guess(self._shares @ parts, self.name, tuple(parts))

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        """See `Model`."""
        self._mix(np.array([likelihood(part, end, exact) for part in guess.parts]))
        self._head.learn(Example(prompt.features.ids, prompt.features.weights, end, exact))
        self._index.add(prompt.vector, tokens, exact)

    def _mix(self, found: Array) -> None:
        """A step of expectation maximization on the shares, from the likelihood that each part gave to an end."""
        self._learnt += 1
        step = max(_MIXING, 1.0 / (self._learnt + 2))
        shares = self._shares * (1 - step + step * found / (self._shares @ found))
        shares = np.maximum(shares, _LEAST_SHARE)
        self._shares = shares / shares.sum()

    def __len__(self) -> int:
        """Past requests that it searches."""
        return len(self._index)

    def state(self) -> dict[str, Array]:
        """See `Model`."""
        return (
            {"shares": self._shares, "learnt": np.array([self._learnt])}
            | prefixed("head", self._head.state())
            | prefixed("index", self._index.state())
        )

    def restore(self, state: Mapping[str, Array]) -> None:
        """See `Model`."""
        self._shares, self._learnt = state["shares"], int(state["learnt"][0])
        self._head.restore(part_of(state, "head"))
        self._index.restore(part_of(state, "index"))


def prefixed(name: str, state: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays under names that begin with `name` and a dot."""
    return {f"{name}.{key}": value for key, value in state.items()}


def part_of(state: Mapping[str, Array], name: str) -> dict[str, Array]:
    """What `prefixed` put under this name."""
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}


class PriorOnly:
    """The lengths of the requests that ended of late, whatever the prompt."""

    name = "prior"

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        """See `Model`."""
        return Guess(prior.mass(), self.name)

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        """See `Model`: the forecaster's prior learns."""

    def state(self) -> dict[str, Array]:
        """See `Model`."""
        return {}

    def restore(self, state: Mapping[str, Array]) -> None:
        """See `Model`."""
