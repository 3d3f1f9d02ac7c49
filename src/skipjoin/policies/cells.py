from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
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


class Standing(NamedTuple):
    """What the order of a request depends on besides its index and its arrival.

    Attributes:
        is_fresh: Whether it has a claim to an early first token.
        is_old: Whether no later request may overtake it, except for its first token.
        is_overdue: Whether later requests may no longer overtake it because of its prompt.
    """

    is_fresh: bool = False
    is_old: bool = False
    is_overdue: bool = False


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

    def add(self, entry: Entry) -> None:
        if not self.entries or self.entries[-1] < entry:
            self.entries.append(entry)
        else:
            insort(self.entries, entry)

    def remove(self, entry: Entry) -> None:
        del self.entries[bisect_left(self.entries, entry)]

    def key(self, entry: Entry) -> Key:
        return (self.base + self.per_s * entry[0], entry[0], entry[1])

    def find(self, key: Key, first: int = 0) -> int:
        return bisect_left(self.entries, key, first, key=self.key)


class SortedCells:
    """Requests of cells by key, ties by arrival and id, sorted as far as they have been read."""

    def __init__(self) -> None:
        self._cells: list[Cell] = []
        # Sorted part: all requests with keys below `_limit`, which is None once there are no others.
        self._keys: list[Key] = []
        self._requests: list[Request] = []
        self._limit: Key | None = None

    def reset(self, cells: Iterable[Cell]) -> None:
        self._cells = list(cells)
        self._keys, self._requests = [], []
        self._limit = _BELOW_ALL if self._cells else None

    def open(self, cell: Cell) -> None:
        self._cells.append(cell)

    def close(self, cell: Cell) -> None:
        self._cells.remove(cell)

    # Both compute the key of `Cell.key` in place, because a call takes as long as the rest.
    def add(self, cell: Cell, entry: Entry) -> None:
        arrival, number, request = entry
        key, limit = (cell.base + cell.per_s * arrival, arrival, number), self._limit
        if limit is None or key < limit:
            at = bisect_left(self._keys, key)
            self._keys.insert(at, key)
            self._requests.insert(at, request)

    def remove(self, cell: Cell, entry: Entry) -> None:
        arrival, number, _ = entry
        key, limit = (cell.base + cell.per_s * arrival, arrival, number), self._limit
        if limit is None or key < limit:
            at = bisect_left(self._keys, key)
            del self._keys[at], self._requests[at]

    def __iter__(self) -> Iterator[Request]:
        return chain(self._requests, self._unread())

    def _unread(self) -> Iterator[Request]:
        count = _FIRST_READ
        while self._limit is not None:
            at = len(self._requests)
            self._read(self._limit, count)
            yield from islice(self._requests, at, None)
            count *= 2

    def _read(self, start: Key, count: int) -> None:
        """Sort further requests: `count` of one cell, and those of the others up to the next one of that cell."""
        unread = [(cell, 0 if start is _BELOW_ALL else cell.find(start)) for cell in self._cells]
        next_keys = (cell.key(cell.entries[at + count]) for cell, at in unread if at + count < len(cell.entries))
        limit = self._limit = min(next_keys, default=None)
        found: list[tuple[Key, Request]] = []
        for cell, at in unread:
            end = len(cell.entries) if limit is None else cell.find(limit, at)
            base, per_s = cell.base, cell.per_s
            entries = cell.entries[at:end]
            found += [((base + per_s * arrival, arrival, number), request) for arrival, number, request in entries]
        found.sort(key=itemgetter(0))
        self._keys += [key for key, _ in found]
        self._requests += [request for _, request in found]
