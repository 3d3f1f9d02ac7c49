"""The simulator's driver: it owns a virtual clock, which jumps from event to event."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Protocol

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle
from skipjoin.observe.decisions import DecisionTimes
from skipjoin.policies.dispatch import Dispatch

# Most steps that are taken together: foreseeing them is lost work where a request arrives before their end.
_MOST_STEPS = 32


class StalledError(RuntimeError):
    """Requests are left, but nothing is in flight and nothing arrives any more: a scheduler error."""


class Replica:
    """One engine on the virtual clock.

    decision_s: host time that every decision takes before its step can begin, on the virtual clock. decisions: how long
    those that gave a plan took on the real one; nothing depends on it.

    Steps that only decode are taken together where the executor foresees them and policies rest
    (`EngineCore.decode`): times and tokens are those of single steps. They take no decision of their own.
    """

    def __init__(self, core: EngineCore, executor: SimulatedExecutor, *, decision_s: float = 0.0) -> None:
        self.core = core
        self._executor = executor
        self.decisions = DecisionTimes()
        self._decision_s = decision_s
        self._in_flight: deque[SimulatedHandle] = deque()
        # Called in every turn after its decisions, with the time.
        self.on_decided: Callable[[float], None] = lambda now: None
        # When the step in flight and those after it end, where they are taken together; otherwise empty.
        self._ends: Sequence[float] = ()

    @property
    def next_at(self) -> float:
        """When `turn` must be called next if nothing arrives; inf: never."""
        if self._ends:
            return self._ends[-1]
        landing = self._in_flight[0].ready_at if self._in_flight else math.inf
        return min(landing, self.core.next_deadline)

    def turn(self, now: float, arrived: Iterable[Request]) -> list[Event]:
        """Settle landed plans, take arrivals, start plans that can run. Returns the events."""
        core, in_flight = self.core, self._in_flight
        self._settle(now)
        while in_flight and in_flight[0].ready_at <= now:
            core.finish_step(in_flight.popleft().result(), now)
        for request in arrived:
            core.add(request, now)
        self._start(now)
        self.on_decided(now)
        self._ends = self._foreseen()
        return core.take_events()

    def settle(self, now: float) -> list[Event]:
        """Take the steps that ended by now, where several are taken together. Returns the events."""
        self._settle(now)
        return self.core.take_events()

    def _start(self, now: float) -> None:
        while (plan := self._decide(now)) is not None:
            self._in_flight.append(self._executor.submit(plan, now + self._decision_s))

    def _decide(self, now: float) -> StepPlan | None:
        begun = perf_counter()
        plan = self.core.start_step(now)
        if plan is not None:
            self.decisions.add(perf_counter() - begun)
        return plan

    def _foreseen(self) -> Sequence[float]:
        """The ends of the step in flight and of those after it that only decode, as long as no request arrives."""
        if self._decision_s or (plan := self.core.steady()) is None:
            return ()
        ends = self._executor.foresee(self._in_flight[0], _MOST_STEPS)
        requests = (piece.request for piece in plan.slices)
        return ends if len(ends) > 1 and self.core.kv.growth(requests, len(ends)) is not None else ()

    def _settle(self, now: float) -> None:
        """Take the steps that ended by now together, and begin the one that did not."""
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
    """Run all requests on one replica to their end, or until `until`. Returns the time of the end.

    requests: with their arrivals, in seconds, in any order. on_events: called with the events of each instant.
    """
    return simulate_cluster([replica], requests, _One(), on_events=lambda _, events: on_events(events), until=until)


class Traffic(Protocol):
    """What comes to the replicas of a run, and when."""

    @property
    def next_at(self) -> float:
        """When something comes next; inf: nothing, unless a replica does something."""
        ...

    @property
    def left(self) -> int:
        """Requests that are neither at a replica nor over."""
        ...

    def due(self, now: float) -> Iterable[tuple[int, Request | None]]:
        """What comes by `now`: replicas that turn, each with a request that it takes or None. Asked at every instant,
        before any replica turns."""
        ...

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        """What happened in a replica's turn."""


class Arrivals:
    """Requests in the order of their arrival. requests: in any order, with their arrivals in seconds."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._queue = deque(sorted(requests, key=lambda request: (request.arrival, request.id)))

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def next_at(self) -> float:
        """When the next one arrives; inf: never."""
        return self._queue[0].arrival if self._queue else math.inf

    def take(self, now: float) -> Iterator[Request]:
        """Take those that have arrived by `now`."""
        while self._queue and self._queue[0].arrival <= now:
            yield self._queue.popleft()

    def observe(self, events: Sequence[Event]) -> None:
        """What happened to requests that were taken; a request that goes on elsewhere has not ended."""


class Dispatched:
    """Requests that go to the replica that `dispatch` chooses when they arrive, and end there."""

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
    """As `simulate`, on several replicas; `dispatch` chooses the replica of a request when it arrives."""
    traffic = Dispatched(Arrivals(requests), dispatch)
    del requests  # ended requests must be freed
    return simulate_traffic(replicas, traffic, on_events=on_events, until=until)


def simulate_traffic(
    replicas: Sequence[Replica],
    traffic: Traffic,
    *,
    on_events: Callable[[int, list[Event]], None] = lambda replica, events: None,
    until: float = math.inf,
) -> float:
    """As `simulate_cluster`, with any traffic."""
    due = [math.inf] * len(replicas)  # when each replica turns next
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


class _One:
    """The dispatch rule of a single replica."""

    ignores_tokens = True

    def choose(self, request: Request) -> int:
        return 0

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        pass
