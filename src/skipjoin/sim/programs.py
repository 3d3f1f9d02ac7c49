from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from skipjoin.core.events import Event, Finished
from skipjoin.core.request import Request
from skipjoin.sim.driver import Arrivals


class Calls:
    """Calls of one program by number, each with the pause before it in seconds."""

    def __init__(self, numbers: Iterable[tuple[int, float]]) -> None:
        self._left = deque(numbers)

    def __len__(self) -> int:
        return len(self._left)

    def next(self) -> tuple[int, float]:
        return self._left.popleft()


class ProgramArrivals(Arrivals):
    """Arrivals of programs, whose next call comes a pause after the one before has finished.

    Programs come with the time of their first call. `submit` returns the request of a number at a time.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        programs: Iterable[tuple[float, Calls]],
        submit: Callable[[int, float], Request],
    ) -> None:
        super().__init__(requests)
        self._submit = submit
        self._due: list[tuple[float, int, Calls]] = []
        self._running: dict[int, Calls] = {}  # by the number of the call
        for at, calls in programs:
            self._schedule(at, calls)

    def __len__(self) -> int:
        return super().__len__() + sum(1 + len(calls) for _, _, calls in self._due)

    @property
    def next_at(self) -> float:
        return min(super().next_at, self._due[0][0] if self._due else math.inf)

    def take(self, now: float) -> Iterator[Request]:
        yield from super().take(now)
        while self._due and self._due[0][0] <= now:
            at, number, calls = heapq.heappop(self._due)
            self._running[number] = calls
            yield self._submit(number, at)

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished) and (calls := self._running.pop(event.request.id, None)):
                self._schedule(event.now, calls)

    def _schedule(self, now: float, calls: Calls) -> None:
        if calls:
            number, pause_s = calls.next()
            heapq.heappush(self._due, (now + pause_s, number, calls))
