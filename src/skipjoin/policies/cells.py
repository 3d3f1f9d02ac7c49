from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

from skipjoin.core.request import Request
from skipjoin.policies.gittins import Kind

# Requests of a cell that are read at first; most cells have fewer.
_FIRST_READ = 16
# Arrival, id and request: sorts by arrival, and never compares requests.
Entry = tuple[float, int, Request]
# Sort key: base and weighted age, arrival, id.
Key = tuple[float, float, int]
_BELOW_ALL: Key = (-math.inf, 0.0, 0)
# Key and request: sorts by key, and never compares requests.
Ranked = tuple[float, float, int, Request]
_REQUEST_OF: Callable[[Ranked], Request] = itemgetter(3)


class Standing(NamedTuple):
    """What the order of a request depends on besides its index and its arrival."""

    is_fresh: bool = False  # has a claim to an early first token
    is_old: bool = False  # no later request may overtake it, except for its first token
    is_overdue: bool = False  # later requests may no longer overtake it because of its prompt


class Cell:
    """Requests of one standing, kind and bin, oldest first, with sort keys `base` + `per_s` x arrival in a group."""

    __slots__ = ("base", "entries", "group", "kind", "per_s", "place", "standing")

    def __init__(self, standing: Standing, kind: Kind, place: int, base: float = 0.0, per_s: float = 1.0) -> None:
        self.standing = standing
        self.kind = kind
        self.place = place
        self.base = base
        self.per_s = per_s
        self.group = 0
        self.entries: list[Entry] = []

    def key(self, entry: Entry) -> Key:
        return (self.base + self.per_s * entry[0], entry[0], entry[1])

    def find(self, key: Key, first: int = 0) -> int:
        return bisect_left(self.entries, key, first, key=self.key)


class SortedCells:
    """Requests of several cells by key, ties by arrival and id. They are sorted only as far as they are read."""

    def __init__(self) -> None:
        self._cells: list[Cell] = []
        # Sorted part: all requests with keys below `_limit`, which is None once there are no others.
        self._sorted: list[Ranked] = []
        self._limit: Key | None = None

    def reset(self, cells: Iterable[Cell]) -> None:
        self._cells = list(cells)
        self._sorted = []
        self._limit = _BELOW_ALL if self._cells else None

    def open(self, cell: Cell) -> None:
        self._cells.append(cell)

    def close(self, cell: Cell) -> None:
        self._cells.remove(cell)

    # Both compute the key of `Cell.key` in place, because a call takes as long as the rest.
    def add(self, cell: Cell, entry: Entry) -> None:
        insort(cell.entries, entry)
        arrival, number, request = entry
        ranked, limit = (cell.base + cell.per_s * arrival, arrival, number, request), self._limit
        if limit is None or ranked < limit:
            insort(self._sorted, ranked)

    def remove(self, cell: Cell, entry: Entry) -> None:
        entries = cell.entries
        del entries[bisect_left(entries, entry)]
        arrival, number, request = entry
        ranked, limit = (cell.base + cell.per_s * arrival, arrival, number, request), self._limit
        if limit is None or ranked < limit:
            del self._sorted[bisect_left(self._sorted, ranked)]

    def __iter__(self) -> Iterator[Request]:
        return chain(map(_REQUEST_OF, self._sorted), self._unread())

    def _unread(self) -> Iterator[Request]:
        count = _FIRST_READ
        while self._limit is not None:
            at = len(self._sorted)
            self._read(self._limit, count)
            yield from map(_REQUEST_OF, islice(self._sorted, at, None))
            count *= 2

    def _read(self, start: Key, count: int) -> None:
        """Sort further requests: `count` of one cell, and those of the others up to the next one of that cell."""
        unread = [(cell, 0 if start is _BELOW_ALL else cell.find(start)) for cell in self._cells]
        next_keys = (cell.key(cell.entries[at + count]) for cell, at in unread if at + count < len(cell.entries))
        limit = self._limit = min(next_keys, default=None)
        found: list[Ranked] = []
        for cell, at in unread:
            end = len(cell.entries) if limit is None else cell.find(limit, at)
            base, per_s = cell.base, cell.per_s
            entries = cell.entries[at:end]
            found += [(base + per_s * arrival, arrival, number, request) for arrival, number, request in entries]
        found.sort()
        self._sorted += found
