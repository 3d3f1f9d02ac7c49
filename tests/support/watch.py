"""An engine core that checks every decision, and a driver that a test can stop between any two of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Token
from skipjoin.core.kv import KVLedger
from skipjoin.core.policy import CostModel, Policies, Pressure
from skipjoin.core.request import Request
from skipjoin.core.scheduler import Scheduler
from skipjoin.core.step import Direction, Move, StepPlan, StepResult
from skipjoin.exec.simulated import SimulatedExecutor, position_as_token
from skipjoin.recipes import Settings, build
from skipjoin.sim.driver import Replica, simulate
from support.policies import COST

# One entry per plan: when, and the plan with request ids in place of requests.
Trace = list[tuple[float, Any]]


@dataclass(frozen=True)
class World:
    """Everything that decides a run, apart from the requests.

    pressure: None keeps the recipe's own. The pools are small, so that loads of `support.load` press on them.
    """

    recipe: str = "fastserve"
    depth: int = 1
    overlap: bool = False
    pressure: Callable[[], Pressure] | None = None
    device_blocks: int = 40
    host_blocks: int = 60
    block_size: int = 4
    max_seqs: int = 6
    max_tokens: int = 64
    starvation_s: float = 0.3
    eviction_limit: int = 4
    cost: CostModel = COST

    def policies(self) -> Policies:
        """The recipe's policies, with this world's pressure."""
        settings = Settings(self.cost, self.max_seqs, self.max_tokens, self.starvation_s)
        policies = build(self.recipe, settings)
        return policies if self.pressure is None else replace(policies, pressure=self.pressure())

    def core(self, policies: Policies | None = None) -> WatchedCore:
        """A watched core of this world."""
        kv = KVLedger(self.device_blocks, self.host_blocks, self.block_size)
        scheduler = Scheduler(
            policies or self.policies(),
            kv,
            depth=self.depth,
            overlap=self.overlap,
            eviction_limit=self.eviction_limit,
        )
        return WatchedCore(scheduler)


class WatchedCore(EngineCore):
    """An engine core that proves after every call that blocks are conserved, and of every plan that it is sound.

    trace: every plan with its time. plans: the plans in flight, oldest first. newcomer_evictions: by request id,
    the evictions that only a newcomer can have caused.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.trace: Trace = []
        self.plans: deque[StepPlan] = deque()
        self.newcomer_evictions: dict[int, int] = {}

    def start_step(self, now: float) -> StepPlan | None:
        before = {request: _State.of(request, self.kv) for request in self.requests.values()}
        plan = super().start_step(now)
        self.kv.check()
        if plan is None:
            assert self.plans or not self.requests, f"idle at {now} while requests {list(self.requests)} wait"
            return None
        self._check_effect(plan)
        self._check_slices(plan, before)
        self._check_evictions(plan, before)
        self.plans.append(plan)
        self.trace.append((now, plan_value(plan)))
        return plan

    def finish_step(self, result: StepResult, now: float) -> None:
        self.plans.popleft()
        super().finish_step(result, now)
        self.kv.check()

    def abort(self, request_id: int, now: float) -> bool:
        found = super().abort(request_id, now)
        self.kv.check()
        return found

    def assert_home(self) -> None:
        """Every block of both tiers is free, and nobody is promised any."""
        kv = self.kv
        assert not self.plans
        assert not self.requests
        assert (kv.device_free, kv.host_free, kv.promised_idle) == (kv.device_total, kv.host_total, 0)
        assert list(kv.holders()) == []

    # -- what is checked of a plan ------------------------------------------------------------------------

    def _check_effect(self, plan: StepPlan) -> None:
        assert plan.slices or plan.before or plan.beside, "a plan without effect"
        ran = [piece.request for piece in plan.slices]
        moved = [move.request for move in (*plan.before, *plan.beside)]
        assert len(set(ran)) == len(ran), "a request twice in one plan"
        assert len(set(moved)) == len(moved), "a request moved twice in one plan"
        for move in (*plan.before, *plan.beside):
            assert len(move.source) == len(move.target) > 0
        out = {move.request for move in plan.before if move.direction is Direction.OUT}
        idle = out | {move.request for move in plan.beside}
        assert not idle.intersection(ran), "a request runs while its KV leaves, or arrives too late"

    def _check_slices(self, plan: StepPlan, before: dict[Request, _State]) -> None:
        kv = self.kv
        blocks: list[int] = []
        for piece in plan.slices:
            was = before[piece.request]
            end = piece.start + piece.tokens
            assert piece.tokens >= 1
            assert piece.start == (0 if piece.request.evictions > was.evictions else was.planned)
            assert end <= was.known + was.awaited < piece.request.limit
            assert piece.samples == (end == was.known + was.awaited)
            assert piece.awaits == (end > was.known)
            assert piece.blocks == kv.slots(piece.request)
            assert len(piece.blocks) >= kv.blocks_for(end)
            blocks.extend(piece.blocks)
            if piece.awaits:
                assert self.scheduler.overlap
                # The newest plan in flight with a slice of the request samples the token; with two plans in flight at
                # most, that is the plan just before this one.
                flying = [m for p in reversed(self.plans) for m in p.slices if m.request is piece.request]
                assert flying[0].samples
                assert self.scheduler.depth > 2 or any(m is flying[0] for m in self.plans[-1].slices)
            if not self.scheduler.overlap:
                assert all(mine.request is not piece.request for flying in self.plans for mine in flying.slices)
        assert len(set(blocks)) == len(blocks), "two slices share a block"

    def _check_evictions(self, plan: StepPlan, before: dict[Request, _State]) -> None:
        """Victims do not run; they leave only for somebody who matters more and runs in this very plan; who holds
        nothing on the device evicts nobody at the limit, and none of its equals."""
        ordering, limit = self.scheduler.policies.ordering, self.scheduler.eviction_limit
        ran = [piece.request for piece in plan.slices]
        grown = [r for r in ran if 0 < before[r].device < len(self.kv.slots(r))]
        new = [r for r in ran if before[r].device == 0]
        for victim in self.requests.values():
            if victim.evictions == before[victim].evictions:
                continue
            assert victim.evictions == before[victim].evictions + 1
            assert victim not in ran, "evicted and run in one step"
            by_growth = any(ordering.rank(r) < ordering.rank(victim) for r in grown)
            by_newcomer = before[victim].evictions < limit and any(ordering.outranks(r, victim) for r in new)
            assert by_growth or by_newcomer, f"request {victim.id} was evicted for nobody"
            if not by_growth:
                self.newcomer_evictions[victim.id] = self.newcomer_evictions.get(victim.id, 0) + 1


@dataclass(frozen=True)
class _State:
    """A request just before a decision. device: blocks that it has on the device and may use."""

    known: int
    planned: int
    awaited: int
    evictions: int
    device: int

    @classmethod
    def of(cls, request: Request, kv: KVLedger) -> _State:
        held = kv.holding(request)
        on_device = len(held.device) if held is not None and held.moving is None else 0
        return cls(request.known, request.planned, request.awaited, request.evictions, on_device)


def plan_value(plan: StepPlan) -> Any:
    """The plan with request ids in place of requests: equal for equal decisions of different runs."""

    def moves(some: tuple[Move, ...]) -> Any:
        return tuple((move.direction.name, move.request.id, move.source, move.target) for move in some)

    slices = tuple((piece.request.id, *piece[1:]) for piece in plan.slices)
    return plan.id, slices, moves(plan.before), moves(plan.beside)


@dataclass
class Run:
    """A finished run. output: each request's tokens by id."""

    core: WatchedCore
    requests: list[Request]
    end: float
    events: list[Event] = field(default_factory=list)

    @property
    def trace(self) -> Trace:
        return self.core.trace

    @property
    def output(self) -> dict[int, list[int]]:
        return {request.id: request.output for request in self.requests}


def run(
    world: World,
    requests: Iterable[Request],
    *,
    sample: Callable[[Request, int], int] = position_as_token,
    core: WatchedCore | None = None,
) -> Run:
    """Run the requests to their end on the virtual clock, every step watched; all blocks must be home then."""
    todo = list(requests)
    core = core or world.core()
    events: list[Event] = []
    end = simulate(Replica(core, SimulatedExecutor(world.cost, sample)), todo, on_events=events.extend)
    core.assert_home()
    return Run(core, todo, end, events)


class Stepper:
    """A driver in slow motion: the test says when plans start and when they finish.

    tokens: each request's generated tokens by id, as the events told them.
    """

    def __init__(self, core: WatchedCore, sample: Callable[[Request, int], int] = position_as_token) -> None:
        self.core = core
        self.now = 0.0
        self.events: list[Event] = []
        self.tokens: dict[int, list[int]] = {}
        self._sample = sample

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.core.add(request, self.now)

    def start(self) -> StepPlan | None:
        """Decide one plan."""
        plan = self.core.start_step(self.now)
        self._take()
        return plan

    def finish(self) -> StepPlan:
        """Finish the oldest plan in flight, 10 ms later."""
        self.now += 0.01
        plan = self.core.plans[0]
        tokens = [self._sample(p.request, p.start + p.tokens) if p.samples else None for p in plan.slices]
        self.core.finish_step(StepResult(plan, tokens, 0.01), self.now)
        self._take()
        return plan

    def step(self) -> StepPlan:
        """Start one plan and finish the oldest."""
        plan = self.start()
        assert plan is not None
        self.finish()
        return plan

    def drain(self, most: int = 10_000) -> None:
        """Keep the pipeline full until every request has ended; all blocks must be home then."""
        for _ in range(most):
            while self.start() is not None:
                pass
            if not self.core.plans:
                break
            self.finish()
        self.core.assert_home()

    def _take(self) -> None:
        for event in self.core.take_events():
            self.events.append(event)
            if isinstance(event, Token):
                self.tokens.setdefault(event.request.id, []).append(event.token)
