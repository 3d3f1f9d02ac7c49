from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from skipjoin.core.events import Computed, Event, Moved, Preempted
from skipjoin.core.step import Direction

# Steps that end within this time share a summary, which bounds the summaries per second.
RESOLUTION_S = 0.01
# Summaries kept until the next reply.
_MAX_SUMMARIES = 512


@dataclass(slots=True)
class StepSummary:
    """Steps that ended within `RESOLUTION_S`."""

    begin: float
    end: float
    steps: int = 0
    busy_s: float = 0.0
    requests: int = 0  # of the last step
    prefill: int = 0  # prompt tokens computed, including recomputed ones
    decodes: int = 0
    blocks_in: int = 0  # KV blocks that arrived on the device
    blocks_out: int = 0  # and on the CPU tier
    moving_s: float = 0.0  # part of `busy_s` for which steps waited for moves
    preemptions: int = 0


class StepLog:
    def __init__(self) -> None:
        self._summaries: deque[StepSummary] = deque(maxlen=_MAX_SUMMARIES)
        self._preemptions = 0  # since the last step

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if type(event) is Computed:
                self._compute(event)
            elif type(event) is Preempted:
                self._preemptions += 1
            elif type(event) is Moved and event.move.request is not None and self._summaries:
                blocks, last = len(event.move.source), self._summaries[-1]
                if event.move.direction is Direction.IN:
                    last.blocks_in += blocks
                elif event.move.direction is Direction.OUT:
                    last.blocks_out += blocks

    def take(self) -> list[StepSummary]:
        found = list(self._summaries)
        self._summaries.clear()
        return found

    def _compute(self, event: Computed) -> None:
        result, now = event.result, event.now
        last = self._summaries[-1] if self._summaries else None
        if last is None or now - last.begin > RESOLUTION_S:
            last = StepSummary(now - result.seconds, now)
            self._summaries.append(last)
        last.end = now
        last.steps += 1
        last.busy_s += result.seconds
        last.moving_s += result.moving
        last.requests = len(result.plan.slices)
        for slice_ in result.plan.slices:
            if slice_.tokens == 1 and slice_.samples and slice_.start >= len(slice_.request.prompt):
                last.decodes += 1
            else:
                last.prefill += slice_.tokens
        last.preemptions += self._preemptions
        self._preemptions = 0
