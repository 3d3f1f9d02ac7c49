"""Requests in cells of equal index, each in arrival order, and their order by index and age."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from skipjoin.core.request import Request
from skipjoin.policies.gittins import Kind

# Requests of a cell that are read at first; most cells have fewer.
_FIRST_READ = 16
# Arrival, id and request: sorts by arrival, and never compares requests.
Entry = tuple[float, int, Request]


class Cell:
    """Requests of one kind and bin, in arrival order.

    Attributes:
        is_fresh: Whether its requests have a claim to an early first token.
        base: Part of the sort key that its requests share; smaller is better.
        entries: Its requests, oldest first.
    """

    __slots__ = ("base", "entries", "is_fresh", "kind", "place")

    def __init__(self, kind: Kind, place: int, base: float, *, is_fresh: bool) -> None:
        self.kind = kind
        self.place = place
        self.base = base
        self.is_fresh = is_fresh
        self.entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        if not self.entries or self.entries[-1] < entry:
            self.entries.append(entry)
        else:
            insort(self.entries, entry)

    def remove(self, entry: Entry) -> None:
        del self.entries[bisect_left(self.entries, entry)]


def by_arrival(cells: Iterable[Cell]) -> Iterator[Request]:
    """Iterate lazily over the requests of the cells by arrival."""
    lists = [cell.entries for cell in cells]
    return (entry[2] for entry in (lists[0] if len(lists) == 1 else heapq.merge(*lists)))


def by_key(cells: Iterable[Cell], per_s: float) -> Iterator[Request]:
    """Iterate lazily over the requests of the cells by base + `per_s` x arrival, ties by arrival and id.

    Only the first requests of each cell are read at first. A cell is read further once all its read requests have been
    yielded.
    """

    def keyed(cell: Cell, start: int, end: int) -> list[tuple[float, float, int, Request]]:
        base = cell.base
        return [(base + per_s * arrival, arrival, number, one) for arrival, number, one in cell.entries[start:end]]

    found: list[tuple[float, float, int, Request]] = []
    unread: list[tuple[tuple[float, float, int, Request], int, Cell]] = []
    for cell in cells:
        found += keyed(cell, 0, _FIRST_READ)
        if len(cell.entries) > _FIRST_READ:
            unread.append((keyed(cell, _FIRST_READ, _FIRST_READ + 1)[0], _FIRST_READ, cell))
    found.sort()
    while unread:
        limit, at, cell = limiting = min(unread)
        end = bisect_left(found, limit)
        for entry in found[:end]:
            yield entry[3]
        found = found[end:] + keyed(cell, at, 2 * at)
        found.sort()
        unread.remove(limiting)
        if len(cell.entries) > 2 * at:
            unread.append((keyed(cell, 2 * at, 2 * at + 1)[0], 2 * at, cell))
    for entry in found:
        yield entry[3]
