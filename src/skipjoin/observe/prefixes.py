"""KV that requests found in the cache, folded from core events."""

from __future__ import annotations

from typing import NamedTuple

from skipjoin.core.events import Admitted
from skipjoin.core.request import Request


class PrefixUse:
    """What requests whose KV has keys found of it.

    queried: prompt tokens of those that were admitted for the first time. hit: how many of these were cached. regained:
    tokens that requests found after an eviction, their own KV or that of others.
    """

    def __init__(self) -> None:
        self.counts = PrefixCounts()
        self._admitted: set[Request] = set()

    def admitted(self, event: Admitted) -> None:
        """A request holds KV from now on. One that brings its KV from another engine looked there."""
        request = event.request
        if request.prefix is None or request.resumed_tokens:
            return
        queried, hit, regained = self.counts
        if request in self._admitted:
            self.counts = PrefixCounts(queried, hit, regained + event.cached)
        else:
            self._admitted.add(request)
            self.counts = PrefixCounts(queried + len(request.prompt), hit + event.cached, regained)

    def finished(self, request: Request) -> None:
        """The request is over."""
        self._admitted.discard(request)

    def close(self) -> None:
        """Forget the requests."""
        self._admitted.clear()


class PrefixCounts(NamedTuple):
    """Tokens, as in `PrefixUse`."""

    queried: int = 0
    hit: int = 0
    regained: int = 0
