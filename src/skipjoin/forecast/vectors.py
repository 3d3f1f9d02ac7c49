from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from skipjoin.forecast.mass import Array
from skipjoin.options import ConfigError
from skipjoin.version import needs

# Limit of exact search, which takes well under a millisecond.
EXACT_ENTRIES = 10_000


class Vectors(Protocol):
    def put(self, index: int, vector: Array) -> None: ...
    def drop(self, index: int) -> None: ...

    def search(self, vector: Array, count: int) -> tuple[Array, Array]:
        """Return indices of up to `count` most similar vectors, and their cosines; unused ones may come with 0."""

    def state(self, indices: Array) -> dict[str, Array]: ...

    def restore(self, state: Mapping[str, Array], kept: int, same: bool) -> Array:
        """Restore the last `kept` vectors of a `state`, and return their indices; `same` if capacities are equal."""


def vectors_of(entries: int, width: int) -> Vectors:
    if entries <= EXACT_ENTRIES:
        return ExactVectors(entries, width)
    return GraphVectors(width)


def _graph(width: int) -> Any:
    try:
        from usearch.index import Index  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            f"{needs(f'forecast_entries above {EXACT_ENTRIES}', 'usearch', 'predict')}; or set at most that"
        ) from None
    return Index(ndim=width, metric="ip", dtype="f16")


def _stored(state: Mapping[str, Array], width: int) -> Array:
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
    def __init__(self, entries: int, width: int) -> None:
        self._matrix: Array = np.zeros((entries, width), np.float32)
        self._used = 0  # end of the indices ever filled

    def put(self, index: int, vector: Array) -> None:
        self._matrix[index] = vector
        self._used = max(self._used, index + 1)

    def drop(self, index: int) -> None:
        self._matrix[index] = 0.0

    def search(self, vector: Array, count: int) -> tuple[Array, Array]:
        scores = self._matrix[: self._used] @ vector
        best = np.argpartition(scores, self._used - count)[-count:] if self._used > count else np.arange(self._used)
        return best, scores[best]

    def state(self, indices: Array) -> dict[str, Array]:
        return {"vectors": self._matrix[indices].astype(np.float16)}

    def restore(self, state: Mapping[str, Array], kept: int, same: bool) -> Array:
        found = _stored(state, self._matrix.shape[1])
        self._matrix[:kept] = found[len(found) - kept :]
        self._matrix[kept:] = 0.0
        self._used = kept
        return np.arange(kept)


class GraphVectors:
    def __init__(self, width: int) -> None:
        self._width = width
        self._graph = _graph(width)

    def put(self, index: int, vector: Array) -> None:
        if index in self._graph:
            self._graph.remove(index)
        self._graph.add(index, vector, threads=1)

    def drop(self, index: int) -> None:
        self._graph.remove(index)

    def search(self, vector: Array, count: int) -> tuple[Array, Array]:
        if not len(self._graph):
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        found = self._graph.search(vector, count, threads=1)
        return found.keys.astype(np.int64), 1.0 - found.distances

    def state(self, indices: Array) -> dict[str, Array]:
        return {"graph": np.frombuffer(bytes(self._graph.save()), np.uint8), "places": indices}

    def restore(self, state: Mapping[str, Array], kept: int, same: bool) -> Array:
        graph = _graph(self._width)
        if same and "graph" in state:
            graph.load(state["graph"].tobytes())
            indices = state["places"]
        else:
            found = _stored(state, self._width)
            indices = np.arange(kept)
            graph.add(indices, found[len(found) - kept :].astype(np.float32))
        self._graph = graph
        return indices
