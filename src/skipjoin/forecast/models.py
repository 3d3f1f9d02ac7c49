"""Models of output lengths, and what a `Forecaster` asks of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from skipjoin.forecast.encode import FEATURES, Hashed
from skipjoin.forecast.head import Example, Head
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
    """What a model says: a distribution over the bins, what it is made from, and what the model needs to learn."""

    mass: Array
    source: str
    parts: tuple[Array, ...] = ()


class Model(Protocol):
    """Foresees output lengths from prompts and learns from those that ended."""

    name: str

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        """The distribution of the output's length."""
        ...

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        """The output that was guessed ended after `tokens` tokens, in bin `end`; not exact: it was cut off there."""
        ...

    def __len__(self) -> int:
        """Past requests that it searches."""
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

    def __init__(self, index: VectorIndex) -> None:
        self._index = index
        self._head = Head(FEATURES)
        self._shares: Array = np.full(3, 1 / 3)

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        """See `Model`."""
        base = prior.hazards()
        logits = np.log(base) - np.log1p(-base)
        near = neighbours_mass(self._index.search(prompt.vector, NEIGHBOURS), base)
        head = self._head.mass(prompt.features.ids, prompt.features.weights, logits)
        parts = np.stack([prior.mass(), near, head])
        return Guess(self._shares @ parts, self.name, (parts, logits))

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        """See `Model`."""
        parts, logits = guess.parts
        found = np.array([likelihood(part, end, exact) for part in parts])
        shares = self._shares * ((1 - _MIXING) + _MIXING * found / (self._shares @ found))
        self._shares = np.maximum(shares, _LEAST_SHARE) / np.maximum(shares, _LEAST_SHARE).sum()
        self._head.learn(Example(prompt.features.ids, prompt.features.weights, logits, end, exact))
        self._index.add(prompt.vector, tokens, exact)

    def __len__(self) -> int:
        """See `Model`."""
        return len(self._index)

    def state(self) -> dict[str, Array]:
        """See `Model`."""
        return {"shares": self._shares} | prefixed("head", self._head.state()) | prefixed("index", self._index.state())

    def restore(self, state: Mapping[str, Array]) -> None:
        """See `Model`."""
        self._shares = state["shares"]
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
