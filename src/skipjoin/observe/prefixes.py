from __future__ import annotations

from dataclasses import dataclass

from skipjoin.core.events import Admitted


@dataclass(slots=True)
class PrefixUse:
    """Counters in prompt tokens: of first admissions, and `regained` at later ones, after an eviction."""

    queried: int = 0
    hit: int = 0
    regained: int = 0
    hit_on_cpu: int = 0
    saved_bytes: int = 0

    def admitted(self, event: Admitted) -> None:
        request = event.request
        if request.prefix is None or request.resumed:
            return
        if not event.is_first:
            self.regained += event.cached
            return
        self.queried += len(request.prompt)
        self.hit += event.cached
        self.hit_on_cpu += event.on_cpu
