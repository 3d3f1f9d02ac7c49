from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from skipjoin.core.events import Arrived, Computed, Event, Finished, Planned, Restarted


class Rests:
    """Tracks which plans follow a period without requests. Stages that were idle in it had no bubble."""

    def __init__(self) -> None:
        self._live = 0
        self._has_rested = True
        self._in_flight: deque[bool] = deque()

    def observe(self, event: Event) -> bool:
        if isinstance(event, Planned):
            self._in_flight.append(self._has_rested and not self._in_flight)
            self._has_rested = False
        elif isinstance(event, Computed):
            return self._in_flight.popleft()
        elif isinstance(event, Arrived):
            self._live += 1
        elif isinstance(event, Finished):
            self._live -= 1
            self._has_rested = self._has_rested or not self._live
        elif isinstance(event, Restarted):
            self._in_flight.clear()
            self._has_rested = True
        return False


class StageUse:
    def __init__(self) -> None:
        self.busy: list[float] = []
        self.idle: list[float] = []
        self._rests = Rests()

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            after_rest = self._rests.observe(event)
            if isinstance(event, Computed) and event.result.stages:
                stages = event.result.stages
                if not self.busy:
                    self.busy, self.idle = [0.0] * len(stages), [0.0] * len(stages)
                for number, (busy, idle) in enumerate(stages):
                    self.busy[number] += busy
                    self.idle[number] += 0.0 if after_rest else idle
