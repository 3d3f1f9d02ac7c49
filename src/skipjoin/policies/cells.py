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

    A cell's requests are in order, so only the heads of cells are compared.
    """
    heads = []
    for cell in cells:
        arrival, number, _ = cell.entries[0]
        heads.append((cell.base + per_s * arrival, arrival, number, 0, cell))
    if len(heads) == 1:
        for entry in heads[0][4].entries:
            yield entry[2]
        return
    heapq.heapify(heads)
    while heads:
        *_, at, cell = heads[0]
        entries, base = cell.entries, cell.base
        others = heads[1:3]
        limit = min(others)[:3] if others else None
        while True:
            yield entries[at][2]
            at += 1
            if at == len(entries):
                heapq.heappop(heads)
                break
            arrival, number, _ = entries[at]
            key = (base + per_s * arrival, arrival, number)
            if limit is not None and key > limit:
                heapq.heapreplace(heads, (*key, at, cell))
                break
