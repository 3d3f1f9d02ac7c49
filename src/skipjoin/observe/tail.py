from __future__ import annotations

from collections import deque

from skipjoin.core.waits import WaitReason
from skipjoin.observe.life import Interval

# Changes of the reason that are kept, for requests that join the tail and leave it much later.
_MAX_CHANGES = 1024


class TailReasons:
    """Reason why requests that no decision examined wait, since when."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, str]] = deque([(0.0, WaitReason.NOT_EXAMINED.value)], _MAX_CHANGES)

    def change(self, reason: WaitReason, now: float) -> None:
        if self._changes[-1][1] != reason.value:
            self._changes.append((now, reason.value))

    def intervals(self, since: float, until: float | None, preempted: str) -> list[Interval]:
        found: list[Interval] = []
        end = until
        for begin, reason in reversed(self._changes):
            if until is None or begin < until:
                start = max(begin, since)
                if end is None or end > start:
                    found.append(Interval(reason, start, end, preempted))
                end = start
            if begin <= since:
                break
        if end is not None and end > since:  # older changes are forgotten
            found.append(Interval(self._changes[0][1], since, end, preempted))
        return found[::-1]
