from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from skipjoin.core.policy import Callbacks
from skipjoin.core.request import Request

_key_of: Callable[[tuple[Any, Request]], Any] = itemgetter(0)
_request_of: Callable[[tuple[Any, Request]], Request] = itemgetter(1)


class Ranking:
    """Requests by key, smallest first. Keys must be comparable and distinct, so end them with the request's id.

    Volatile keys, which change in the next step, are sorted when first read after a change, which is cheap while they
    are few.
    """

    def __init__(self) -> None:
        self._stable: list[tuple[Any, Request]] = []
        self._volatile: dict[Request, Any] = {}
        self._sorted: list[tuple[Any, Request]] | None = None  # the volatile ones, unless they changed
        self._keys: dict[Request, Any] = {}
        # Called for many requests in every step.
        self.key: Callable[[Request], Any] = self._keys.__getitem__

    def __contains__(self, request: Request) -> bool:
        return request in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def set_stable(self, request: Request, key: Any) -> None:
        if self._keys.get(request) == key and request not in self._volatile:
            return
        self.discard(request)
        self._keys[request] = key
        insort(self._stable, (key, request), key=_key_of)

    def set_volatile(self, request: Request, key: Any) -> None:
        if request not in self._volatile:
            self.discard(request)
        self._keys[request] = self._volatile[request] = key
        self._sorted = None

    def set_all_volatile(self, keys: Mapping[Request, Any]) -> None:
        for request in keys.keys() - self._volatile.keys():
            self.discard(request)
        self._volatile.update(keys)
        self._keys.update(keys)
        self._sorted = None

    def discard(self, request: Request) -> None:
        if request in self._volatile:
            del self._volatile[request], self._keys[request]
            self._sorted = None
        elif (key := self._keys.pop(request, None)) is not None:
            del self._stable[bisect_left(self._stable, key, key=_key_of)]

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._merged()) if self._volatile else map(_request_of, self._stable)

    def _merged(self) -> Iterator[Iterable[Request]]:
        """Iterate over runs of requests, in turn with volatile and with stable keys."""
        if (volatile := self._sorted) is None:
            volatile = self._sorted = sorted(zip(self._volatile.values(), self._volatile, strict=True), key=_key_of)
        stable, begin, at = self._stable, 0, 0
        while begin < len(volatile):
            end = bisect_left(volatile, stable[at][0], begin, key=_key_of) if at < len(stable) else len(volatile)
            yield map(_request_of, volatile[begin:end])
            begin = end
            if begin < len(volatile):
                before, at = at, bisect_left(stable, volatile[begin][0], at, key=_key_of)
                yield map(_request_of, stable[before:at])
        yield map(_request_of, islice(stable, at, None))


class Ranked(Callbacks):
    """Base of an ordering by the keys of one `Ranking`. Requests with equal first elements are equals."""

    def __init__(self) -> None:
        self._ranking = Ranking()

    def ranked(self, now: float) -> Iterator[Request]:
        return iter(self._ranking)

    def rank(self, request: Request) -> Any:
        return self._ranking.key(request)

    def outranks(self, one: Request, other: Request) -> bool:
        return bool(self.rank(one)[0] < self.rank(other)[0])

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.rank(request)[0], request) for request in sorted(requests, key=self.rank)]
