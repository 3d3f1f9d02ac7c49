"""The vectors of past prompts with the lengths of their outputs, bounded in number and age."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from skipjoin.forecast.mass import Array
from skipjoin.forecast.vectors import vectors_of


class Found(NamedTuple):
    """Similar prompts: cosine similarity, output tokens and whether the output ended by itself; (n,) each."""

    similarity: Array
    tokens: Array
    exact: Array


class VectorIndex:
    """A ring of at most `entries` vectors; the oldest leave, and those older than `max_age_s` seconds of `clock`.

    Raises `ConfigError` for more entries than can be searched; see `vectors_of`.
    """

    def __init__(self, width: int, entries: int, max_age_s: float, clock: Callable[[], float]) -> None:
        self._entries, self._max_age_s, self._clock = entries, max_age_s, clock
        self._vectors = vectors_of(entries, width)
        self._tokens: Array = np.zeros(entries, np.int32)  # 0: the place is free
        self._exact: Array = np.zeros(entries, np.bool_)
        self._times: Array = np.zeros(entries)
        self._oldest = self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, vector: Array, tokens: int, exact: bool) -> None:
        """Remember how long an output got; not exact: it was cut off there."""
        now = self._clock()
        self._forget(now - self._max_age_s)
        place = (self._oldest + self._size) % self._entries
        if self._size == self._entries:
            self._oldest = (self._oldest + 1) % self._entries
        else:
            self._size += 1
        self._vectors.put(place, vector)
        self._tokens[place], self._exact[place], self._times[place] = tokens, exact, now

    def search(self, vector: Array, count: int) -> Found:
        """The up to `count` entries most similar to a vector of length 1, in any order."""
        places, similarity = self._vectors.search(vector, count)
        taken = self._tokens[places] > 0
        places = places[taken]
        return Found(similarity[taken], self._tokens[places], self._exact[places])

    def _forget(self, before: float) -> None:
        while self._size and self._times[self._oldest] < before:
            self._vectors.drop(self._oldest)
            self._tokens[self._oldest] = 0
            self._oldest = (self._oldest + 1) % self._entries
            self._size -= 1

    def state(self) -> dict[str, Array]:
        """The arrays to keep."""
        ring = {"tokens": self._tokens.copy(), "exact": self._exact.astype(np.uint8), "times": self._times.copy()}
        return ring | {"oldest": np.array([self._oldest, self._size])} | self._vectors.state()

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take the arrays of `state`. Raises ValueError or KeyError if they are not of an index of this size."""
        if len(state["tokens"]) != self._entries:
            raise ValueError(f"an index of {len(state['tokens'])} entries, not {self._entries}")
        self._tokens, self._times = state["tokens"].copy(), state["times"].copy()
        self._exact = state["exact"].astype(np.bool_)
        self._oldest, self._size = map(int, state["oldest"])
        self._vectors.restore(state)
