from __future__ import annotations

from collections.abc import Callable, Sequence

from skipjoin.core.events import Event

# Events that are observed at once, which bounds how long that takes.
MAX_EVENTS = 512


class EventBuffer:
    """Collects the events of several steps for observers.

    A visit per step would cost several times as much, because steps evict observers from the processor's caches.
    """

    def __init__(self, observers: Sequence[Callable[[Sequence[Event]], None]] = ()) -> None:
        self._observers = observers
        self._events: list[Event] = []

    def add(self, events: Sequence[Event]) -> None:
        self._events += events
        if len(self._events) >= MAX_EVENTS:
            self.flush()

    def flush(self) -> None:
        events, self._events = self._events, []
        for observe in self._observers if events else ():
            observe(events)
