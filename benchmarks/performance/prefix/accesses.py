"""Offline hit rates of prefix caches on the sequence of a workload's prompts.

The analysis has no running requests and no times. Belady's order knows the future.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

Name = int
# The names of a prompt's full parts, and its number of tokens.
Prompt = tuple[tuple[Name, ...], int]


def hit_rate(prompts: Sequence[Prompt], part: int, size: int | None, *, optimal: bool = False) -> float:
    """Return the share of prompt tokens that a cache holds when their prompt arrives.

    Args:
        size: Capacity in parts; None for an unlimited cache.
        optimal: Evict the part whose next use is latest (Belady) instead of the least recently used one.
    """
    uses = _uses(prompts) if optimal else {}
    cache = _Cache(size, (lambda name, now: -_next(uses[name], now)) if optimal else (lambda name, now: now))
    hits = total = 0
    for now, (names, tokens) in enumerate(prompts):
        usable = names[: (tokens - 1) // part]
        found = next((index for index, name in enumerate(usable) if name not in cache), len(usable))
        hits, total = hits + found * part, total + tokens
        # In reverse, so that a part is evicted before the parts that precede it.
        for name in reversed(names):
            cache.use(name, now)
    return hits / total


class _Cache:
    """Cache that evicts the name with the lowest value; `value` returns that of a name that is used now."""

    def __init__(self, size: int | None, value: Callable[[Name, int], float]) -> None:
        self._size = size
        self._value = value
        self._order = count()
        self._held: dict[Name, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Name]] = []

    def __contains__(self, name: Name) -> bool:
        return name in self._held

    def use(self, name: Name, now: int) -> None:
        value, order = self._held[name] = self._value(name, now), next(self._order)
        heappush(self._heap, (value, order, name))
        while self._size is not None and len(self._held) > self._size:
            value, order, least = heappop(self._heap)
            if self._held.get(least) == (value, order):
                del self._held[least]
        if len(self._heap) > 4 * len(self._held) + 1000:
            self._heap = [(value, order, name) for name, (value, order) in self._held.items()]
            heapify(self._heap)


def _uses(prompts: Sequence[Prompt]) -> dict[Name, list[int]]:
    """Return the times at which each name is used, latest first."""
    uses: dict[Name, list[int]] = {}
    for now in range(len(prompts) - 1, -1, -1):
        for name in prompts[now][0]:
            uses.setdefault(name, []).append(now)
    return uses


def _next(times: list[int], now: int) -> float:
    """Return the first time after now, and drop those before it."""
    while times and times[-1] <= now:
        times.pop()
    return times[-1] if times else float("inf")
