"""Places with vectors, and the search for those most similar to another: exactly, or in a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from skipjoin.forecast.mass import Array
from skipjoin.knobs import ConfigError

# What a product with all vectors does in well under a millisecond.
EXACT_ENTRIES = 10_000


class Vectors(Protocol):
    """Vectors of length 1 in numbered places."""

    def put(self, place: int, vector: Array) -> None:
        """Fill a place, which may be taken."""
        ...

    def drop(self, place: int) -> None:
        """Empty a place, which is taken."""
        ...

    def search(self, vector: Array, count: int) -> tuple[Array, Array]:
        """The places of the up to `count` most similar vectors, in any order, and the cosines; (n,) each. A place that
        is empty may be among them, with a cosine of 0."""
        ...

    def state(self) -> dict[str, Array]:
        """The arrays to keep."""
        ...

    def restore(self, state: Mapping[str, Array]) -> None:
        """Take the arrays of `state`. Raises ValueError or KeyError if they are no such state."""
        ...


def vectors_of(entries: int, width: int) -> Vectors:
    """Room for so many vectors. Raises `ConfigError` for more than an exact search can do without usearch."""
    if entries <= EXACT_ENTRIES:
        return ExactVectors(entries, width)
    try:
        from usearch.index import Index  # type: ignore[import-not-found]  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            f"entries: more than {EXACT_ENTRIES} need usearch; install skipjoin[predict], or set at most that"
        ) from None
    return GraphVectors(lambda: Index(ndim=width, metric="ip", dtype="f16"))


class ExactVectors:
    """A matrix; one product scores all places."""

    def __init__(self, entries: int, width: int) -> None:
        self._matrix: Array = np.zeros((entries, width), np.float32)
        self._used = 0  # places from here on were never filled

    def put(self, place: int, vector: Array) -> None:
        """See `Vectors`."""
        self._matrix[place] = vector
        self._used = max(self._used, place + 1)

    def drop(self, place: int) -> None:
        """See `Vectors`."""
        self._matrix[place] = 0.0

    def search(self, vector: Array, count: int) -> tuple[Array, Array]:
        """See `Vectors`."""
        scores = self._matrix[: self._used] @ vector
        best = np.argpartition(scores, self._used - count)[-count:] if self._used > count else np.arange(self._used)
        return best, scores[best]

    def state(self) -> dict[str, Array]:
        """See `Vectors`."""
        return {"matrix": self._matrix[: self._used].astype(np.float16)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """See `Vectors`."""
        self._used = len(state["matrix"])
        self._matrix[: self._used] = state["matrix"]


class GraphVectors:
    """A graph of neighbours (HNSW), kept by usearch: a search looks at few hundred vectors of any number."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._graph = make()

    def put(self, place: int, vector: Array) -> None:
        """See `Vectors`."""
        if place in self._graph:
            self._graph.remove(place)
        self._graph.add(place, vector)

    def drop(self, place: int) -> None:
        """See `Vectors`."""
        self._graph.remove(place)

    def search(self, vector: Array, count: int) -> tuple[Array, Array]:
        """See `Vectors`."""
        if not len(self._graph):
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        found = self._graph.search(vector, count)
        return found.keys.astype(np.int64), 1.0 - found.distances

    def state(self) -> dict[str, Array]:
        """See `Vectors`."""
        return {"graph": np.frombuffer(bytes(self._graph.save()), np.uint8)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """See `Vectors`."""
        self._graph = self._make()
        self._graph.load(state["graph"].tobytes())
