"""Documented bounds as invariants of a run, and a driver that checks them after every step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skipjoin.core.decide.candidates import MAX_BEHIND_S
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Waited
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import Request, RequestOptions
from skipjoin.core.step import Slice, StepPlan, StepShape
from skipjoin.core.waits import WaitReason
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle
from support.watch import World


class Invariant(Protocol):
    def check(self, run: BoundedRun, plan: StepPlan, begin: float, events: Sequence[Event]) -> None:
        """Check the state after a step, which began at `begin` and ends now."""
        ...


@dataclass
class BoundedRun:
    """An engine on the virtual clock, with a load that may depend on its state.

    Attributes:
        send: Called before each decision, to add requests.
        shares: Number of tokens with which all prompts begin.
    """

    world: World
    send: Callable[[BoundedRun], None]
    invariants: Sequence[Invariant] = ()
    shares: int = 0
    now: float = 0.0
    count: int = 0
    flight: deque[SimulatedHandle] = field(default_factory=deque)

    def __post_init__(self) -> None:
        world = self.world
        kv = KVLedger(world.device_blocks, world.cpu_blocks, world.block_size)
        self.core = EngineCore(Scheduler(world.policies(), kv, depth=world.depth, overlap=world.overlap))
        self._executor = SimulatedExecutor(self.world.cost, stages=self.world.stages)

    @property
    def live(self) -> list[Request]:
        return list(self.core.requests.values())

    def add(self, prompt: int | Sequence[int], output: int, **options: object) -> Request:
        """Add a request with a prompt, or with one of this length."""
        own, tokens = 10_000 * (self.count + 1), prompt
        if isinstance(prompt, int):
            tokens = [*range(min(self.shares, prompt)), *range(own, own + prompt - min(self.shares, prompt))]
        prefix = ContentPrefix(self.world.block_size) if self.shares or tokens is prompt else None
        request = Request(self.count, self.now, tokens, output, options=RequestOptions(**options), prefix=prefix)
        self.count += 1
        self.core.add(request, self.now)
        return request

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.send(self)
            while (plan := self.core.start_step(self.now)) is not None:
                self.flight.append(self._executor.submit(plan, self.now))
            handle, begin = self.flight.popleft(), self.now
            self.now = max(self.now, handle.ready_at)
            result = handle.result()
            self.core.finish_step(result, self.now)
            events = self.core.take_events()
            for invariant in self.invariants:
                invariant.check(self, result.plan, begin, events)


def is_past_first_token(slice_: Slice) -> bool:
    return slice_.samples and len(slice_.request.progress.output) > 1


def lacks_more_than_later_ones_hold(run: BoundedRun) -> bool:
    """Return whether the first request without KV would lack some if all that rank after it had none."""
    kv, rank = run.core.kv, run.core.scheduler.policies.ordering.rank
    waiting = [request for request in run.live if kv.blocks_of(request) is None]
    if not waiting:
        return False
    first = min(waiting, key=rank)
    held = sum(
        kv.footprint(holder)
        for holder in kv.holders()
        if holder.progress.finish_reason is None and rank(holder) > rank(first)
    )
    return kv.blocks_for(first.progress.known) + 1 > kv.available + held


@dataclass
class Overtaking:
    """`overtaking_s`: later requests past their first token do not run while one waits that arrived long before.

    Attributes:
        slack_s: Time that moves, plans in flight and protected first tokens may take.
    """

    overtaking_s: float
    slack_s: float
    spent: Counter[Request] = field(default_factory=Counter)

    def check(self, run: BoundedRun, plan: StepPlan, begin: float, events: Sequence[Event]) -> None:
        latest: dict[object, float] = {}
        for slice_ in filter(is_past_first_token, plan.slices):
            band = slice_.request.progress.band
            latest[band] = max(latest.get(band, -math.inf), slice_.request.arrival)
        running = {slice_.request for slice_ in plan.slices}
        if latest and lacks_more_than_later_ones_hold(run):
            return
        for request in run.live:
            if request in running or request.progress.in_flight:
                continue
            if latest.get(request.progress.band, -math.inf) > request.arrival + self.overtaking_s:
                self.spent[request] += run.now - begin
                assert self.spent[request] <= self.slack_s, (
                    f"request {request.id} of {request.arrival:.2f} s was overtaken for {self.spent[request]:.2f} s, "
                    f"at last at {run.now:.2f} s with {run.core.scheduler.waits.get(request)}"
                )


@dataclass
class EqualService:
    """Fairness: the counts of two clients differ by at most `most` while both have requests waiting."""

    most: float
    weight: float
    clients: tuple[str, str] = ("a", "b")
    served: Counter[str] = field(default_factory=Counter)
    counted: defaultdict[Request, int] = field(default_factory=lambda: defaultdict(int))

    def check(self, run: BoundedRun, plan: StepPlan, begin: float, events: Sequence[Event]) -> None:
        for slice_ in plan.slices:
            request, end = slice_.request, min(slice_.start + slice_.tokens, len(slice_.request.prompt))
            self.served[request.options.client] += max(0, end - self.counted[request]) + self.weight * slice_.samples
            self.counted[request] = max(self.counted[request], end)
        difference = abs(self.served[self.clients[0]] - self.served[self.clients[1]])
        assert difference <= self.most, f"counts differ by {difference:g}, not at most {self.most:g}, at {run.now:.2f}"


@dataclass
class SharedSteps:
    """Fairness: a step takes at most as often the time of its first client's requests as there are clients."""

    def check(self, run: BoundedRun, plan: StepPlan, begin: float, events: Sequence[Event]) -> None:
        real_time = [slice_ for slice_ in plan.slices if not slice_.request.is_best_effort]
        if not real_time or any(request.is_best_effort for request in run.live):
            return
        clients = {request.options.client for request in run.live} | {
            slice_.request.options.client for slice_ in real_time
        }
        first = [slice_ for slice_ in real_time if slice_.request.options.client == real_time[0].request.options.client]
        cost = run.world.cost
        alone, together = cost.step(StepShape.of(first)), cost.step(StepShape.of(real_time))
        assert together <= len(clients) * alone + 1e-9, f"plan {plan.id} takes {together / alone:.2f} times as long"


@dataclass
class ShortPrefixWaits:
    """`behind_prefix` takes at most five seconds of a request, and the step in which they end."""

    since: dict[Request, float] = field(default_factory=dict)
    spent: Counter[Request] = field(default_factory=Counter)

    def check(self, run: BoundedRun, plan: StepPlan, begin: float, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Waited):
                if (since := self.since.pop(event.request, None)) is not None:
                    self.spent[event.request] += event.now - since
                if event.reason is WaitReason.BEHIND_PREFIX:
                    self.since[event.request] = event.now
        for request in [
            waiting
            for waiting in self.since
            if waiting.progress.finish_reason or waiting not in run.core.scheduler.waits
        ]:
            del self.since[request]
        for request, since in self.since.items():
            assert self.spent[request] + begin - since <= MAX_BEHIND_S + 2 * (run.now - begin)
