"""KV that requests found in the cache, folded from core events."""

from __future__ import annotations

from typing import NamedTuple

from skipjoin.core.events import Admitted
from skipjoin.core.request import Request


class PrefixUse:
    """What requests whose KV has keys found of it.

    queried: prompt tokens of those that were admitted for the first time. hit: how many of these were cached. regained:
    tokens that requests found after an eviction, their own KV or that of others. hit_on_host: how many of `hit` came
    from the host. saved_bytes: of KV that was copied there before the device lost it.
    """

    def __init__(self) -> None:
        self.counts = PrefixCounts()
        self._admitted: set[Request] = set()

    def admitted(self, event: Admitted) -> None:
        """A request holds KV from now on. One that brings its KV from another engine looked there."""
        request = event.request
        if request.prefix is None or request.resumed_tokens:
            return
        counts = self.counts
        if request in self._admitted:
            self.counts = counts._replace(regained=counts.regained + event.cached)
            return
        self._admitted.add(request)
        self.counts = counts._replace(
            queried=counts.queried + len(request.prompt),
            hit=counts.hit + event.cached,
            hit_on_host=counts.hit_on_host + event.on_host,
        )

    def saved(self, copied: int) -> None:
        """So many bytes are on the host."""
        self.counts = self.counts._replace(saved_bytes=self.counts.saved_bytes + copied)

    def finished(self, request: Request) -> None:
        """The request is over."""
        self._admitted.discard(request)

    def close(self) -> None:
        """Forget the requests."""
        self._admitted.clear()


class PrefixCounts(NamedTuple):
    """Tokens and bytes, as in `PrefixUse`."""

    queried: int = 0
    hit: int = 0
    regained: int = 0
    hit_on_host: int = 0
    saved_bytes: int = 0
