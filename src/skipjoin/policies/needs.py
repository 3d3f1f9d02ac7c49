from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.request import Request
from skipjoin.core.selective import Limits, lacks_kv

# Returns the needs of a waiting request in blocks, as many as there are limits; None for one that it does not have.
Needs = Callable[[Request, KVAccounts], Sequence[int | None]]


class NeedIndex:
    """Waiting requests by each of their needs, and in rank order among those of equal need."""

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._kinds: list[_Kind] = []
        # Needs depend on the block size, which only the ledger has. They are computed when the index is next read.
        self._new: dict[Request, Any] = {}
        self._placed: dict[Request, tuple[Any, Sequence[int | None]]] = {}

    def put(self, request: Request, key: Any) -> None:
        self.discard(request)
        self._new[request] = key

    def move(self, request: Request, key: Any) -> None:
        """Change the key of a request, if it is there, whose needs are as before."""
        if request in self._new:
            self._new[request] = key
        elif (placed := self._placed.get(request)) is not None:
            before, needs = placed
            for kind, need in zip(self._kinds, needs, strict=True):
                if need is not None:
                    kind.discard(need, before)
                    kind.put(need, key, request)
            self._placed[request] = key, needs

    def discard(self, request: Request) -> None:
        self._new.pop(request, None)
        if (placed := self._placed.pop(request, None)) is not None:
            key, needs = placed
            for kind, need in zip(self._kinds, needs, strict=True):
                if need is not None:
                    kind.discard(need, key)

    def fitting(self, limits: Limits, kv: KVAccounts) -> Iterator[Request]:
        self._place_new(kv)
        seen: set[Request] = set()
        while True:
            most = limits()
            queues = [queue for kind, limit in zip(self._kinds, most, strict=False) for queue in kind.up_to(limit)]
            for _, request in heapq.merge(*queues, key=itemgetter(0)):
                if request not in seen and lacks_kv(request, kv):  # this step may have admitted it before
                    seen.add(request)
                    yield request
                    if limits() != most:
                        break
            else:
                return

    def _place_new(self, kv: KVAccounts) -> None:
        admitted = dict[Request, Any]()  # in this step, whose needs are hardly ever read
        for request, key in self._new.items():
            if not lacks_kv(request, kv):
                admitted[request] = key
                continue
            needs = self._needs(request, kv)
            if len(needs) > len(self._kinds):
                self._kinds += [_Kind() for _ in needs[len(self._kinds) :]]
            for kind, need in zip(self._kinds, needs, strict=True):
                if need is not None:
                    kind.put(need, key, request)
            self._placed[request] = key, needs
        self._new = admitted


class _Kind:
    def __init__(self) -> None:
        self._needs: list[int] = []  # ascending
        self._queues: dict[int, list[tuple[Any, Request]]] = {}

    def put(self, need: int, key: Any, request: Request) -> None:
        if need not in self._queues:
            self._queues[need] = []
            insort(self._needs, need)
        insort(self._queues[need], (key, request), key=itemgetter(0))

    def discard(self, need: int, key: Any) -> None:
        queue = self._queues[need]
        del queue[bisect_left(queue, key, key=itemgetter(0))]
        if not queue:
            del self._queues[need], self._needs[bisect_left(self._needs, need)]

    def up_to(self, limit: int) -> list[list[tuple[Any, Request]]]:
        return [self._queues[need] for need in self._needs[: bisect_right(self._needs, limit)]]
