"""Hit rates of caches that hold nothing but KV that was computed, on the sequence of a workload's prompts: an analysis
beside the scheduler, which knows no running requests, no times and, for Belady's order, the future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

Name = int
# A prompt: the names of its full parts and its tokens.
Prompt = tuple[tuple[Name, ...], int]


def hit_rate(prompts: Sequence[Prompt], part: int, size: int | None, *, optimal: bool = False) -> float:
    """Share of prompt tokens that a cache of `size` parts holds when the prompt comes; None: of any size. All but the
    last token can be held. optimal: what is used again latest goes first (Belady), otherwise what was used longest
    ago."""
    uses = _uses(prompts) if optimal else {}
    cache = _Cache(size, (lambda name, now: -_next(uses[name], now)) if optimal else (lambda name, now: now))
    hits = total = 0
    for now, (names, tokens) in enumerate(prompts):
        usable = names[: (tokens - 1) // part]
        found = next((index for index, name in enumerate(usable) if name not in cache), len(usable))
        hits, total = hits + found * part, total + tokens
        # The last parts first: a part is of no use without those before it.
        for name in reversed(names):
            cache.use(name, now)
    return hits / total


class _Cache:
    """Names, of which the one with the least value goes first. value: of a name that is used now."""

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
    """When each name is used, the latest time first."""
    uses: dict[Name, list[int]] = {}
    for now in range(len(prompts) - 1, -1, -1):
        for name in prompts[now][0]:
            uses.setdefault(name, []).append(now)
    return uses


def _next(times: list[int], now: int) -> float:
    """The first time after now; those before are forgotten."""
    while times and times[-1] <= now:
        times.pop()
    return times[-1] if times else float("inf")
