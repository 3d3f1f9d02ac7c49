from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import thread_time
from typing import Protocol

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.core.step import StepResult
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle
from skipjoin.observe.decisions import DecisionTimes
from skipjoin.policies.dispatch import Dispatch, RoundRobin

# Maximum number of steps simulated at once, because an arrival invalidates the rest of the prediction.
_MAX_STEPS = 32


class StalledError(RuntimeError):
    """Requests remain, but no plan is in flight and no request will arrive."""


class Replica:
    """One engine on the virtual clock.

    Args:
        decision_s: Virtual time between each decision and the start of its step.
        on_result: Called with each result after its commit. Decode-only steps that are simulated together have none.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: SimulatedExecutor,
        *,
        decision_s: float = 0.0,
        on_result: Callable[[StepResult], None] = lambda result: None,
    ) -> None:
        self.core = core
        self._executor = executor
        core.on_finished = executor.on_finished
        self.decisions = DecisionTimes()
        self._decision_s = decision_s
        self._on_result = on_result
        self._in_flight: deque[SimulatedHandle] = deque()
        # Called with the time after the decisions of each `turn`.
        self.on_decided: Callable[[float], None] = lambda now: None
        # Predicted ends of the step in flight and of the decode-only steps after it; empty without prediction.
        self._ends: Sequence[float] = ()

    @property
    def next_at(self) -> float:
        if self._ends:
            return self._ends[-1]
        step_end = self._in_flight[0].ready_at if self._in_flight else math.inf
        return min(step_end, self.core.next_deadline)

    def turn(self, now: float, arrived: Iterable[Request]) -> list[Event]:
        core, in_flight = self.core, self._in_flight
        self._settle(now)
        while in_flight and in_flight[0].ready_at <= now:
            result = in_flight.popleft().result()
            core.finish_step(result, now)
            self._on_result(result)
        for request in arrived:
            core.add(request, now)
        self._start(now)
        self.on_decided(now)
        self._ends = self._predicted()
        return core.take_events()

    def settle(self, now: float) -> list[Event]:
        self._settle(now)
        return self.core.take_events()

    def _start(self, now: float) -> None:
        begun = thread_time()
        while (plan := self.core.start_step(now)) is not None:
            self.decisions.add(thread_time() - begun)
            self._in_flight.append(self._executor.submit(plan, now + self._decision_s))
            begun = thread_time()

    def _predicted(self) -> Sequence[float]:
        if self._decision_s or (plan := self.core.steady()) is None:
            return ()
        ends = self._executor.predict(self._in_flight[0], _MAX_STEPS)
        requests = (slice_.request for slice_ in plan.slices)
        return ends if len(ends) > 1 and self.core.kv.growth(requests, len(ends)) is not None else ()

    def _settle(self, now: float) -> None:
        ended = self._ends[: bisect_right(self._ends, now)]
        self._ends = ()
        if not ended:
            return
        self.core.finish_step(self._in_flight.popleft().result(), ended[0])
        if len(ended) > 1:
            self.core.decode(ended[0], ended[1:])
        if ended[-1] < now:
            self._start(ended[-1])


def simulate(
    replica: Replica,
    requests: Iterable[Request],
    *,
    on_events: Callable[[list[Event]], None] = lambda events: None,
    until: float = math.inf,
) -> float:
    """Run requests on one replica until all have finished, at most until `until`, and return the virtual time.

    Example:
        >>> from skipjoin.core.kv.ledger import KVLedger
        >>> from skipjoin.core.decide.scheduler import Scheduler
        >>> from skipjoin.policy import LinearCost, Settings
        >>> from skipjoin.recipes import build
        >>> cost = LinearCost(floor=0.01, prefill_token=1e-4)
        >>> core = EngineCore(Scheduler(build("fastserve", Settings(cost)), KVLedger(100, 0, 16)))
        >>> requests = [Request(number, 0.0, range(50), 20) for number in range(2)]
        >>> round(simulate(Replica(core, SimulatedExecutor(cost)), requests), 3)
        0.21
    """
    return simulate_cluster(
        [replica], requests, RoundRobin(1), on_events=lambda _, events: on_events(events), until=until
    )


class Traffic(Protocol):
    @property
    def next_at(self) -> float:
        """Time of the next request; inf if there is none unless a replica makes progress."""

    @property
    def left(self) -> int: ...

    def due(self, now: float) -> Iterable[tuple[int, Request | None]]:
        """Return the replicas that must run at `now`, each with an arriving request or None.

        Called once per instant, before any replica runs.
        """

    def observe(self, replica: int, events: Sequence[Event]) -> None: ...


class Arrivals:
    def __init__(self, requests: Iterable[Request]) -> None:
        self._queue = deque(sorted(requests, key=lambda request: (request.arrival, request.id)))

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def next_at(self) -> float:
        return self._queue[0].arrival if self._queue else math.inf

    def take(self, now: float) -> Iterator[Request]:
        while self._queue and self._queue[0].arrival <= now:
            yield self._queue.popleft()

    def observe(self, events: Sequence[Event]) -> None:
        """Process events of submitted requests. Moving to another replica does not finish a request."""


class Dispatched:
    def __init__(self, arrivals: Arrivals, dispatch: Dispatch) -> None:
        self._arrivals = arrivals
        self._dispatch = dispatch

    @property
    def next_at(self) -> float:
        return self._arrivals.next_at

    @property
    def left(self) -> int:
        return len(self._arrivals)

    def due(self, now: float) -> Iterator[tuple[int, Request]]:
        for request in self._arrivals.take(now):
            yield self._dispatch.choose(request), request

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        self._dispatch.observe(replica, events)
        self._arrivals.observe(events)


def simulate_cluster(
    replicas: Sequence[Replica],
    requests: Iterable[Request],
    dispatch: Dispatch,
    *,
    on_events: Callable[[int, list[Event]], None] = lambda replica, events: None,
    until: float = math.inf,
) -> float:
    traffic = Dispatched(Arrivals(requests), dispatch)
    del requests  # so that finished requests can be garbage collected
    return simulate_traffic(replicas, traffic, on_events=on_events, until=until)


def simulate_traffic(
    replicas: Sequence[Replica],
    traffic: Traffic,
    *,
    on_events: Callable[[int, list[Event]], None] = lambda replica, events: None,
    until: float = math.inf,
) -> float:
    due = [math.inf] * len(replicas)  # next time at which each replica runs
    wake: list[tuple[float, int]] = []  # the same as a heap, with outdated entries
    now = 0.0
    while True:
        while wake and wake[0][0] != due[wake[0][1]]:
            heapq.heappop(wake)
        instant = min(traffic.next_at, wake[0][0] if wake else math.inf)
        if instant == math.inf:
            break
        if instant > until:
            for index, replica in enumerate(replicas):
                on_events(index, replica.settle(until))
            return until
        now = max(now, instant)
        turning: dict[int, list[Request]] = {}
        while wake and wake[0][0] <= now:
            at, index = heapq.heappop(wake)
            if at == due[index]:
                turning[index] = []
        for index, request in traffic.due(now):
            arrived = turning.setdefault(index, [])
            if request is not None:
                arrived.append(request)
        for index, arrived in turning.items():
            replica = replicas[index]
            events = replica.turn(now, arrived)
            traffic.observe(index, events)
            on_events(index, events)
            due[index] = replica.next_at
            heapq.heappush(wake, (due[index], index))
    left = sum(len(replica.core.requests) for replica in replicas) + traffic.left
    if left:
        raise StalledError(f"{left} requests are left, but no plan is in flight and none arrives")
    return now
