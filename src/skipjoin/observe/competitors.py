from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from skipjoin.core.request import ServiceClass
from skipjoin.observe.history import History

# Requests named in an explanation.
MAX_COMPETITORS = 5


class Competitor(NamedTuple):
    number: int
    seconds: float
    service: ServiceClass
    is_finished: bool


def competitors(history: History, others: Iterable[History], now: float) -> list[Competitor]:
    """Return those of the other requests that ran longest while `history` waited."""
    waits = history.spans(now, is_running=False)
    if not waits:
        return []
    found = []
    for other in others:
        if other.number == history.number or (other.ended or now) <= history.arrival:
            continue
        if (seconds := _overlap(waits, other.spans(now, is_running=True))) > 0:
            found.append(Competitor(other.number, seconds, other.service, other.ended is not None))
    found.sort(key=lambda competitor: (-competitor.seconds, competitor.number))
    return found[:MAX_COMPETITORS]


def _overlap(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    total, at = 0.0, 0
    for begin, end in first:
        while at < len(second) and second[at][1] <= begin:
            at += 1
        for other_begin, other_end in second[at:]:
            if other_begin >= end:
                break
            total += min(end, other_end) - max(begin, other_begin)
    return total
