from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from skipjoin.forecast.mass import Array
from skipjoin.forecast.vectors import vectors_of


class Found(NamedTuple):
    similarity: Array
    tokens: Array
    exact: Array


class VectorIndex:
    """Ring buffer of at most `entries` vectors, none older than `max_age_s`."""

    def __init__(self, width: int, entries: int, max_age_s: float, clock: Callable[[], float]) -> None:
        self.entries, self._max_age_s, self._clock = entries, max_age_s, clock
        self._vectors = vectors_of(entries, width)
        self._tokens: Array = np.zeros(entries, np.int32)  # 0 in free indices
        self._exact: Array = np.zeros(entries, np.bool_)
        self._times: Array = np.zeros(entries)
        self._oldest = self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, vector: Array, tokens: int, exact: bool) -> None:
        now = self._clock()
        self._forget(now - self._max_age_s)
        index = (self._oldest + self._size) % self.entries
        if self._size == self.entries:
            self._oldest = (self._oldest + 1) % self.entries
        else:
            self._size += 1
        self._vectors.put(index, vector)
        self._tokens[index], self._exact[index], self._times[index] = tokens, exact, now

    def search(self, vector: Array, count: int) -> Found:
        indices, similarity = self._vectors.search(vector, count)
        taken = self._tokens[indices] > 0
        indices = indices[taken]
        return Found(similarity[taken], self._tokens[indices], self._exact[indices])

    def _forget(self, before: float) -> None:
        while self._size and self._times[self._oldest] < before:
            self._vectors.drop(self._oldest)
            self._tokens[self._oldest] = 0
            self._oldest = (self._oldest + 1) % self.entries
            self._size -= 1

    def state(self) -> dict[str, Array]:
        indices = (self._oldest + np.arange(self._size)) % self.entries
        ring = {"tokens": self._tokens[indices], "exact": self._exact[indices].astype(np.uint8)}
        return ring | {"times": self._times[indices], "room": np.array([self.entries])} | self._vectors.state(indices)

    def restore(self, state: Mapping[str, Array]) -> None:
        tokens, exact, times = state["tokens"], state["exact"], state["times"]
        if not len(tokens) == len(exact) == len(times) or (len(tokens) and tokens.min() < 1):
            raise ValueError("an index whose entries do not fit together")
        kept = min(len(tokens), self.entries)
        indices = self._vectors.restore(state, kept, int(state["room"][0]) == self.entries)
        self._tokens[:] = 0
        for own, stored in ((self._tokens, tokens), (self._exact, exact), (self._times, times)):
            own[indices] = stored[len(stored) - kept :]
        self._oldest, self._size = int(indices[0]) if kept else 0, kept
