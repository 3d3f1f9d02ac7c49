"""Requests in cells of equal index, each in arrival order, and their order by index and age."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from skipjoin.core.request import Request
from skipjoin.policies.gittins import Kind

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

    A cell's requests are in order, so only the heads of cells are compared, and a search finds how many of a cell's
    requests precede the next head.
    """
    heads = []
    for cell in cells:
        arrival, number, _ = cell.entries[0]
        heads.append((cell.base + per_s * arrival, arrival, number, 0, cell))
    heapq.heapify(heads)
    while heads:
        *_, at, cell = heads[0]
        entries, base = cell.entries, cell.base
        end = len(entries)
        if len(heads) > 1:
            limit = min(heads[1:3])[:3]

            def key(entry: Entry, base: float = base) -> tuple[float, float, int]:
                return (base + per_s * entry[0], entry[0], entry[1])

            # Most runs are of one request or of all.
            if key(entries[-1]) > limit:
                end = at + 1 if key(entries[at + 1]) > limit else bisect_left(entries, limit, at + 2, key=key)
        for position in range(at, end):
            yield entries[position][2]
        if end == len(entries):
            heapq.heappop(heads)
        else:
            arrival, number, _ = entries[end]
            heapq.heapreplace(heads, (base + per_s * arrival, arrival, number, end, cell))
