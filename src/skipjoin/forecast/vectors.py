"""Places with vectors, and the search for those most similar to another: exactly, or in a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from skipjoin.forecast.mass import Array
from skipjoin.options import ConfigError
from skipjoin.version import install_command

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

    def state(self, places: Array) -> dict[str, Array]:
        """The arrays to keep, of the vectors in these places."""
        ...

    def restore(self, state: Mapping[str, Array], kept: int, same: bool) -> Array:
        """Take the last `kept` vectors of a `state`; same: it was made with as much room. Returns their places. Raises
        ValueError or KeyError if it is no such state."""
        ...


def vectors_of(entries: int, width: int) -> Vectors:
    """Room for so many vectors. Raises `ConfigError` for more than an exact search can do without usearch."""
    if entries <= EXACT_ENTRIES:
        return ExactVectors(entries, width)
    return GraphVectors(width)


def _graph(width: int) -> Any:
    try:
        from usearch.index import Index  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            f"forecast_entries: more than {EXACT_ENTRIES} need usearch, or set at most that: "
            f"{install_command('predict')}"
        ) from None
    return Index(ndim=width, metric="ip", dtype="f16")


def _stored(state: Mapping[str, Array], width: int) -> Array:
    """The vectors of a state, in their order, whichever kind of search it was made with."""
    if "vectors" in state:
        found = state["vectors"]
    else:
        graph = _graph(width)
        graph.load(state["graph"].tobytes())
        found = np.asarray(graph.get(state["places"]))
    if found.shape != (len(found), width):
        raise ValueError(f"vectors of shape {found.shape}, not of width {width}")
    return found


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

    def state(self, places: Array) -> dict[str, Array]:
        """See `Vectors`."""
        return {"vectors": self._matrix[places].astype(np.float16)}

    def restore(self, state: Mapping[str, Array], kept: int, same: bool) -> Array:
        """See `Vectors`."""
        found = _stored(state, self._matrix.shape[1])
        self._matrix[:kept] = found[len(found) - kept :]
        self._matrix[kept:] = 0.0
        self._used = kept
        return np.arange(kept)


class GraphVectors:
    """A graph of neighbours (HNSW), kept by usearch: a search looks at few hundred vectors of any number."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._graph = _graph(width)

    def put(self, place: int, vector: Array) -> None:
        """See `Vectors`."""
        if place in self._graph:
            self._graph.remove(place)
        self._graph.add(place, vector, threads=1)

    def drop(self, place: int) -> None:
        """See `Vectors`."""
        self._graph.remove(place)

    def search(self, vector: Array, count: int) -> tuple[Array, Array]:
        """See `Vectors`."""
        if not len(self._graph):
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        found = self._graph.search(vector, count, threads=1)
        return found.keys.astype(np.int64), 1.0 - found.distances

    def state(self, places: Array) -> dict[str, Array]:
        """See `Vectors`."""
        return {"graph": np.frombuffer(bytes(self._graph.save()), np.uint8), "places": places}

    def restore(self, state: Mapping[str, Array], kept: int, same: bool) -> Array:
        """See `Vectors`."""
        graph = _graph(self._width)
        if same and "graph" in state:
            graph.load(state["graph"].tobytes())
            places = state["places"]
        else:
            found = _stored(state, self._width)
            places = np.arange(kept)
            graph.add(places, found[len(found) - kept :].astype(np.float32))
        self._graph = graph
        return places
