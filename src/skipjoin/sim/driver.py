"""The driver of the simulated world: it owns a virtual clock and lets it jump from instant to instant."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle


class StalledError(RuntimeError):
    """Requests are left, nothing is in flight and nothing will arrive: the scheduler lost them."""


def simulate(
    core: EngineCore,
    executor: SimulatedExecutor,
    requests: Iterable[Request],
    *,
    on_events: Callable[[list[Event]], None] = lambda events: None,
    on_plan: Callable[[StepPlan, float], None] = lambda plan, now: None,
) -> float:
    """Run all requests to their end; the time at which the last step landed.

    requests: with their arrivals, in seconds, in any order. on_events, on_plan: called with what happened and with
    each decision, as soon as it is made.
    """
    arrivals = deque(sorted(requests, key=lambda request: (request.arrival, request.id)))
    in_flight: deque[SimulatedHandle] = deque()
    now = 0.0
    while arrivals or in_flight or core.requests:
        instants = (
            arrivals[0].arrival if arrivals else math.inf,
            in_flight[0].ready_at if in_flight else math.inf,
            max(now, core.next_deadline),
        )
        now = min(instants)
        if now == math.inf:
            raise StalledError(f"{len(core.requests)} requests are left and nothing happens any more")
        while in_flight and in_flight[0].ready_at <= now:
            core.finish_step(in_flight.popleft().result(), now)
        while arrivals and arrivals[0].arrival <= now:
            core.add(arrivals.popleft(), now)
        while (plan := core.start_step(now)) is not None:
            on_plan(plan, now)
            in_flight.append(executor.submit(plan, now))
        on_events(core.take_events())
    return now
