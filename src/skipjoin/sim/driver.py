"""The driver of the simulated world: it owns a virtual clock and lets it jump from instant to instant."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle


class StalledError(RuntimeError):
    """Requests are left, nothing is in flight and nothing will arrive: the scheduler lost them."""


class Replica:
    """One engine on the virtual clock.

    decision_s: host time that every decision takes before its step can begin.
    """

    def __init__(self, core: EngineCore, executor: SimulatedExecutor, *, decision_s: float = 0.0) -> None:
        self.core = core
        self._executor = executor
        self._decision_s = decision_s
        self._in_flight: deque[SimulatedHandle] = deque()

    @property
    def next_at(self) -> float:
        """When it must turn next if nothing arrives; inf: never."""
        landing = self._in_flight[0].ready_at if self._in_flight else math.inf
        return min(landing, self.core.next_deadline)

    @property
    def is_busy(self) -> bool:
        """Whether it has requests left, or steps under way."""
        return bool(self.core.requests or self._in_flight)

    def turn(self, now: float, arrived: Iterable[Request] = ()) -> list[Event]:
        """Settle what landed, take what arrived, start what can run; what happened."""
        core, in_flight = self.core, self._in_flight
        while in_flight and in_flight[0].ready_at <= now:
            core.finish_step(in_flight.popleft().result(), now)
        for request in arrived:
            core.add(request, now)
        while (plan := core.start_step(now)) is not None:
            in_flight.append(self._executor.submit(plan, now + self._decision_s))
        return core.take_events()


def simulate(
    replica: Replica,
    requests: Iterable[Request],
    *,
    on_events: Callable[[list[Event]], None] = lambda events: None,
    until: float = math.inf,
) -> float:
    """Run all requests to their end, or until `until`; the time at which that was.

    requests: with their arrivals, in seconds, in any order. on_events: called with what happened at each instant.
    """
    arrivals = deque(sorted(requests, key=lambda request: (request.arrival, request.id)))
    now = 0.0
    while arrivals or replica.is_busy:
        instant = min(arrivals[0].arrival if arrivals else math.inf, max(now, replica.next_at))
        if instant > until:
            return until
        if instant == math.inf:
            raise StalledError(f"{len(replica.core.requests)} requests are left and nothing happens any more")
        now = instant
        arrived = []
        while arrivals and arrivals[0].arrival <= now:
            arrived.append(arrivals.popleft())
        on_events(replica.turn(now, arrived))
    return now
