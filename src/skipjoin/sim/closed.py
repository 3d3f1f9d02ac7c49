from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from skipjoin.core.events import Event, Finished
from skipjoin.core.request import Request
from skipjoin.sim.driver import Arrivals


@dataclass(eq=False, slots=True)
class ClosedStream:
    """Closed-loop stream with at most `size` requests in flight, starting at 0."""

    size: int
    submit: Callable[[float], Request]
    together: bool  # submit the next `size` requests once all earlier ones have finished (BROS section 7.1)
    until: float = math.inf
    in_flight: int = field(default=0, init=False)

    def begin(self) -> Iterator[Request]:
        return self._next(self.size, 0.0)

    def ended(self, now: float) -> Iterator[Request]:
        self.in_flight -= 1
        if not self.together:
            return self._next(1, now)
        return self._next(0 if self.in_flight else self.size, now)

    def _next(self, count: int, now: float) -> Iterator[Request]:
        if now < self.until:
            self.in_flight += count
            yield from (self.submit(now) for _ in range(count))


class ClosedArrivals(Arrivals):
    def __init__(self, requests: Iterable[Request], streams: Sequence[ClosedStream]) -> None:
        super().__init__(requests)
        self._streams: dict[int, ClosedStream] = {}  # stream of each request in flight, by id
        self._due: deque[Request] = deque()
        for stream in streams:
            self._submit(stream, stream.begin())

    def __len__(self) -> int:
        return super().__len__() + len(self._due)

    @property
    def next_at(self) -> float:
        return min(super().next_at, self._due[0].arrival if self._due else math.inf)

    def take(self, now: float) -> Iterator[Request]:
        yield from super().take(now)
        while self._due:
            yield self._due.popleft()

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished) and (stream := self._streams.pop(event.request.id, None)) is not None:
                self._submit(stream, stream.ended(event.now))

    def _submit(self, stream: ClosedStream, requests: Iterator[Request]) -> None:
        for request in requests:
            self._streams[request.id] = stream
            self._due.append(request)
