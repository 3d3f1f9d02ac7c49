from __future__ import annotations

from typing import NamedTuple

from skipjoin.core.events import Admitted


class PrefixUse:
    """Prefix cache statistics of requests that may use cached KV."""

    def __init__(self) -> None:
        self.counts = PrefixCounts()

    def admitted(self, event: Admitted) -> None:
        request = event.request
        if request.prefix is None or request.resumed_tokens:
            return
        counts = self.counts
        if not event.is_first:
            self.counts = counts._replace(regained=counts.regained + event.cached)
            return
        self.counts = counts._replace(
            queried=counts.queried + len(request.prompt),
            hit=counts.hit + event.cached,
            hit_on_cpu=counts.hit_on_cpu + event.on_cpu,
        )

    def saved(self, copied: int) -> None:
        self.counts = self.counts._replace(saved_bytes=self.counts.saved_bytes + copied)


class PrefixCounts(NamedTuple):
    """Counters of `PrefixUse`.

    Attributes:
        queried: Prompt tokens of requests at their first admission.
        regained: Cached tokens at later admissions, after an eviction.
    """

    queried: int = 0
    hit: int = 0
    regained: int = 0
    hit_on_cpu: int = 0
    saved_bytes: int = 0
