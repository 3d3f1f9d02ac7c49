"""An engine core that checks every decision, and a driver with which a test starts and finishes single plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from core_fuzz.device import Device
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Preempted, Preemption, Token
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Owner
from skipjoin.core.policy import AdmissionPolicy, Batcher, CostModel, EvictionPolicy
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction, Move, Slice, StateSizes, StepPlan, StepResult
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle, never, position_as_token
from skipjoin.options import Value
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Recompute
from skipjoin.recipes import EngineLimits, Settings
from skipjoin.sim.driver import Replica, simulate
from support.policies import COST, Ranks
from support.recipes import build, own

# One entry per plan: its time, and the plan with request ids in place of requests.
Trace = list[tuple[float, Any]]


@dataclass(frozen=True)
class World:
    """Settings of a run, apart from its requests.

    The pools are small, so that the loads of `support.load` cause evictions.
    """

    recipe: str = "fastserve"
    depth: int = 1
    overlap: bool = False
    eviction: Callable[[], EvictionPolicy] | None = None
    device_blocks: int = 40
    cpu_blocks: int = 60
    block_size: int = 4
    max_seqs: int = 6
    max_tokens: int = 64
    starvation_s: float = 0.3
    best_effort_wait_s: float = 60.0
    fair_output_weight: float | None = None
    is_exact: bool = True
    stages: int = 1
    cost: CostModel = COST
    machine: CostModel | None = None
    params: tuple[tuple[str, Value], ...] = ()

    def policies(self) -> Policies:
        limits = EngineLimits(
            requests=None,
            max_len=self.device_blocks * self.block_size,
            device_blocks=self.device_blocks,
            cpu_blocks=self.cpu_blocks,
            block_size=self.block_size,
            depth=self.depth,
        )
        settings = Settings(
            self.cost,
            self.max_seqs,
            self.max_tokens,
            stages=self.stages,
            best_effort_wait_s=self.best_effort_wait_s,
            fair_output_weight=self.fair_output_weight,
            limits=None if self.fair_output_weight is None else limits,
        )
        params = {"starvation_s": self.starvation_s, "oracle": "max-tokens", **dict(self.params)}
        policies = build(self.recipe, settings, own(self.recipe, params))
        return policies if self.eviction is None else replace(policies, eviction=self.eviction())

    def core(self, policies: Policies | None = None, *, scheduler: type[Scheduler] = Scheduler) -> WatchedCore:
        kv = KVLedger(self.device_blocks, self.cpu_blocks, self.block_size, is_exact=self.is_exact)
        return WatchedCore(scheduler(policies or self.policies(), kv, depth=self.depth, overlap=self.overlap))


@dataclass(frozen=True)
class IncomingEviction:
    victim: int
    incoming: tuple[int, ...]
    tokens: dict[int, int]


# More plans with slices or moves between two tokens than any load here needs: beyond that, requests evict in circles.
PATIENCE = 5000


class WatchedCore(EngineCore):
    """An engine core that checks every plan, and after every decision that no block is leaked or doubled.

    A decision follows every step, so that a step that leaks a block is found by the next one.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.trace: Trace = []
        self.plans: deque[StepPlan] = deque()
        self.incoming_evictions: list[IncomingEviction] = []
        self._device = Device(self.kv, is_exact=True, voids=True)
        self._fruitless = 0  # plans since the last token

    def start_step(self, now: float) -> StepPlan | None:
        latest, live = self.scheduler.latest_plan, len(self.requests)
        # With a full pipeline the scheduler decides nothing; only deadlines may end requests then.
        is_full = len(self.plans) >= self.scheduler.depth
        before = {} if is_full else {request: _State.of(request, self.kv, latest) for request in self.requests.values()}
        available = self.kv.available
        plan = super().start_step(now)
        assert self.kv.available >= min(0, available), "a decision reserves blocks that are not available"
        if is_full and len(self.requests) == live:
            assert plan is None
            return None
        self.kv.check()
        if plan is None:
            assert self.plans or not self.requests, f"idle at {now} while requests {list(self.requests)} wait"
            return None
        self._check_effect(plan)
        self._check_slices(plan, before)
        self._check_evictions(plan, before)
        self.plans.append(plan)
        self.trace.append((now, plan_value(plan)))
        self._fruitless += bool(plan.slices or plan.blocking or plan.overlapped)
        assert self._fruitless < PATIENCE, f"{PATIENCE} plans without a token"
        return plan

    def decode(self, since: float, ends: Sequence[float]) -> None:
        before = {request: request.progress.computed for request in self.requests.values()}
        super().decode(since, ends)
        for request, start in before.items():
            self._device.fill(request, start)

    def finish_step(self, result: StepResult, now: float) -> None:
        self.plans.popleft()
        tokens = sum(len(request.progress.output) for request in self.requests.values())
        live = len(self.requests)
        slices = result.plan.slices
        was_live = [piece.request.progress.finish_reason is None for piece in slices]
        self._device.follow(result)
        super().finish_step(result, now)
        for index, problem in self._device.tainted.items():
            end = slices[index].start + slices[index].tokens
            assert not was_live[index] or slices[index].request.progress.computed < end, (
                f"a wrong read is kept: {problem}"
            )
        if len(self.requests) < live or tokens < sum(
            len(request.progress.output) for request in self.requests.values()
        ):
            self._fruitless = 0

    def abort(self, request_id: int, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        found = super().abort(request_id, now, reason)
        self.kv.check()
        return found

    def restart(self, now: float) -> None:
        self.plans.clear()
        self._device.clear()
        super().restart(now)
        self.kv.check()
        assert list(self.kv.holders()) == []
        assert not any(
            request.progress.planned or request.progress.computed or request.progress.pending_samples
            for request in self.requests.values()
        )

    def assert_all_free(self) -> None:
        """Assert that no block is held or reserved, except targets of copies in transit for the prefix cache."""
        kv = self.kv
        kv.check()
        assert not self.plans
        assert not self.requests
        copied = kv.tiers.blocks_in_transit[Direction.OUT]
        assert (kv.device_free, kv.tiers.cpu_free + copied) == (kv.device_total, kv.tiers.cpu_total)
        assert list(kv.holders()) == []
        assert kv.cache.awaited == kv.cache._announced == kv.cache._coming == {}

    # -- checks of a plan -------------------------------------------------------------------------------------

    def _check_effect(self, plan: StepPlan) -> None:
        assert plan.slices or plan.blocking or plan.overlapped or self.kv.is_moving, "a plan without effect"
        ran = [piece.request for piece in plan.slices]
        whole = [move for move in (*plan.blocking, *plan.overlapped) if not move.spans]
        moved = [move.request for move in whole if move.request is not None]
        assert len(set(ran)) == len(ran), "a request twice in one plan"
        assert len(set(moved)) == len(moved), "a request moved twice in one plan"
        for move in (*plan.blocking, *plan.overlapped):
            assert len(move.source) == len(move.target) > 0
        out = {move.request for move in plan.blocking if move.direction is Direction.OUT}
        idle = out | {move.request for move in plan.overlapped}
        assert not idle.intersection(ran), "a request runs while its KV is moved"

    def _check_slices(self, plan: StepPlan, before: dict[Request, _State]) -> None:
        kv = self.kv
        for piece in plan.slices:
            was = before[piece.request]
            end = piece.start + piece.tokens
            assert piece.tokens >= 1
            if piece.request.prefix is None or was.planned:
                assert piece.start == (0 if piece.request.progress.evictions > was.evictions else was.planned)
            assert end <= was.known + was.pending_samples < piece.request.max_total_tokens
            assert piece.samples == (end == was.known + was.pending_samples)
            assert piece.awaits == (end > was.known)
            assert piece.blocks == kv.blocks_of(piece.request).table
            assert len(piece.blocks) >= kv.blocks_for(end)
            if piece.awaits:
                assert self.scheduler.overlap
                # The executor keeps the tokens of the plan just before this one.
                assert any(m.samples for m in self.plans[-1].slices if m.request is piece.request)
            if not self.scheduler.overlap:
                # Only chunks of one prompt may be in flight together, and only the last may sample.
                mine = [m for flying in self.plans for m in flying.slices if m.request is piece.request]
                assert not any(m.samples for m in mine), "a request in flight whose next token must be known first"
                assert all(a.start + a.tokens == b.start for a, b in pairwise([*mine, piece]))

    def _check_evictions(self, plan: StepPlan, before: dict[Request, _State]) -> None:
        """Check that each victim does not run and has a reason.

        The reason is a higher-ranked request in this plan. One without KV on the device evicts none of its equals, and
        no running request of its class without a token, unless no request can run with the blocks that it has.
        """
        ordering = self.scheduler.policies.ordering
        ran = [piece.request for piece in plan.slices]
        grown = [r for r in ran if before[r].device and before[r].claim != _State.of(r, self.kv, 0).claim]
        grown += [r for r in ran if (held := self.kv.blocks_of(r)) is not None and held.sharing.borrowed]
        grown += [move.request for move in plan.blocking if move.direction is Direction.WITHIN]
        new = [r for r in ran if before[r].device == 0]
        # A request whose KV is found on the CPU tier has its blocks from now on, but may have to wait for a move.
        new += [m.request for m in plan.overlapped if m.direction is Direction.IN and m.request is not None]
        is_stuck = len(ran) == 1 and not self.plans and not any(state.has_room for state in before.values())
        for victim in self.requests.values():
            if victim.progress.evictions == before[victim].evictions:
                continue
            assert victim not in ran, "evicted and run in one step"
            by_growth = any(ordering.rank(r) < ordering.rank(victim) for r in grown)
            runs = before[victim].last_plan >= before[victim].latest
            is_spared = before[victim].is_newly_resident and runs
            above = [r for r in new if ordering.outranks(r, victim)]
            if is_spared:  # only of a better class
                above = [r for r in above if r.progress.band[0] < victim.progress.band[0]]
            incoming = tuple(r.id for r in above)
            if is_stuck and ordering.rank(ran[0]) < ordering.rank(victim):
                continue
            assert by_growth or incoming, f"request {victim.id} was evicted without a reason"
            if not by_growth and runs:
                tokens = {number: len(request.progress.output) for number, request in self.requests.items()}
                self.incoming_evictions.append(IncomingEviction(victim.id, incoming, tokens))


def nested_in(kv: KVLedger, owner: Owner) -> list[Request]:
    return [request for request in kv.holders() if kv.reservations.parent_of(request) == owner]


class _State(NamedTuple):
    """State of a request just before a decision.

    Attributes:
        device: Number of blocks on the device that it may use; 0 if some of its blocks are not there.
        has_room: Whether these blocks have room for all its tokens.
        claim: Number of blocks that it has reserved, and the parent of the reservation.
        latest: The scheduler's `latest_plan`.
    """

    known: int
    planned: int
    pending_samples: int
    evictions: int
    device: int
    has_room: bool
    claim: tuple[int, Owner]
    is_newly_resident: bool
    last_plan: int
    latest: int

    @classmethod
    def of(cls, request: Request, kv: KVLedger, latest: int) -> _State:
        held = kv.blocks_of(request)
        device, has_room, claim = 0, False, (0, None)
        if held is not None:
            device = len(held.device) if held.moving is None and not held.swapped_out else 0
            has_room = device > 0 and held.room >= request.progress.known + request.progress.pending_samples
            own = held.reservation
            claim = own.size + own.adopted - own.nested_blocks, kv.reservations.parent_of(request)
        known, planned, pending = request.progress.known, request.progress.planned, request.progress.pending_samples
        evictions, is_newly_resident, last_plan = (
            request.progress.evictions,
            request.progress.is_newly_resident,
            request.progress.last_plan,
        )
        return cls(known, planned, pending, evictions, device, has_room, claim, is_newly_resident, last_plan, latest)


def plan_value(plan: StepPlan) -> Any:
    """Return the plan with request ids in place of requests: equal for equal decisions of different runs."""

    def moves(some: tuple[Move, ...]) -> Any:
        return tuple(
            (move.direction.name, move.request.id if move.request is not None else None, *move[2:4], *move.spans)
            for move in some
        )

    slices = tuple((piece.request.id, *piece[1:]) for piece in plan.slices)
    return plan.id, slices, moves(plan.blocking), moves(plan.overlapped)


@dataclass
class Run:
    core: WatchedCore
    requests: list[Request]
    end: float
    events: list[Event] = field(default_factory=list)

    @property
    def trace(self) -> Trace:
        return self.core.trace

    @property
    def output(self) -> dict[int, list[int]]:
        return {request.id: request.progress.output for request in self.requests}


SLICE_ERROR = "too large for the device"


def fail_slices(result: StepResult, fails_slice: Callable[[Slice], bool]) -> StepResult:
    errors = {index: SLICE_ERROR for index, piece in enumerate(result.plan.slices) if fails_slice(piece)}
    if not errors:
        return result
    tokens = [None if index in errors else token for index, token in enumerate(result.tokens)]
    return replace(result, tokens=tokens, dropped=errors)


class SmallDevice(SimulatedExecutor):
    """Simulated executor that fails some slices. `fails_slice` is called once for each slice, in order."""

    fails_slice: Callable[[Slice], bool]

    def submit(self, plan: StepPlan, now: float) -> SimulatedHandle:
        handle = super().submit(plan, now)
        outcome = fail_slices(handle.outcome, self.fails_slice)
        return handle if outcome is handle.outcome else replace(handle, outcome=outcome)


def run(
    world: World,
    requests: Iterable[Request],
    *,
    sample: Callable[[Request, int], int] = position_as_token,
    core: WatchedCore | None = None,
    fails: Callable[[Move], bool] = never,
    fails_slice: Callable[[Slice], bool] = lambda piece: False,
) -> Run:
    """Run the requests to their end on the virtual clock, and check every plan and that all blocks are free then."""
    todo = list(requests)
    core = core or world.core()
    events: list[Event] = []
    executor = SmallDevice(world.machine or world.cost, sample, world.stages, fails=fails)
    executor.fails_slice = fails_slice
    end = simulate(Replica(core, executor), todo, on_events=events.extend)
    core.assert_all_free()
    return Run(core, todo, end, events)


class Stepper:
    """A driver with which a test starts and finishes single plans. `late`, `fails` and `fails_slice` may change."""

    def __init__(self, core: WatchedCore, sample: Callable[[Request, int], int] = position_as_token) -> None:
        self.core = core
        self.now = 0.0
        self.events: list[Event] = []
        self.tokens: dict[int, list[int]] = {}
        self.late = 0
        self.fails: Callable[[Move], bool] = never
        self.fails_slice: Callable[[Slice], bool] = lambda piece: False
        self._sample = sample
        self._transit: list[tuple[int, Move]] = []  # overlapped moves, each with the number of plans before it ends

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.core.add(request, self.now)

    def start(self) -> StepPlan | None:
        plan = self.core.start_step(self.now)
        self._take()
        return plan

    def finish(self) -> StepPlan:
        """Finish the oldest plan in flight, 10 ms later."""
        self.now += 0.01
        plan = self.core.plans[0]
        tokens = [self._sample(p.request, p.start + p.tokens) if p.samples else None for p in plan.slices]
        transit = [*self._transit, *((self.late, move) for move in plan.overlapped)]
        ended = [*plan.blocking, *(move for left, move in transit if left == 0)]
        self._transit = [(left - 1, move) for left, move in transit if left > 0]
        failed = [move for move in ended if self.fails(move)]
        completed = [move for move in ended if move not in failed]
        result = StepResult(plan, tokens, 0.01, completed=completed, failed=failed)
        self.core.finish_step(fail_slices(result, self.fails_slice), self.now)
        self._take()
        return plan

    def step(self) -> StepPlan:
        plan = self.start()
        assert plan is not None
        self.finish()
        return plan

    def ran(self) -> list[int]:
        return [piece.request.id for piece in self.step().slices]

    def fill(self) -> None:
        """Start plans until the pipeline is full or no request can run."""
        while self.start() is not None:
            pass

    def restart(self) -> None:
        """Restart the executor, which loses all KV and all plans in flight."""
        self._transit.clear()
        self.core.restart(self.now)
        self._take()

    def drain(self, max_steps: int = 10_000) -> None:
        """Keep the pipeline full until every request has finished, and check that all blocks are free."""
        for _ in range(max_steps):
            self.fill()
            if not self.core.plans:
                break
            self.finish()
        self.core.assert_all_free()

    def _take(self) -> None:
        for event in self.core.take_events():
            self.events.append(event)
            if isinstance(event, Token):
                self.tokens.setdefault(event.request.id, []).append(event.token)


class Scene(Stepper):
    """A stepper with blocks of four tokens, an ordering that a test sets, and policies that it may replace."""

    def __init__(
        self,
        numbers: Mapping[int, int],
        *,
        blocks: int,
        cpu: int = 0,
        is_exact: bool = True,
        states: StateSizes | None = None,
        depth: int = 1,
        overlap: bool | None = None,
        batcher: Batcher | None = None,
        admission: AdmissionPolicy | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.ordering, self.kv = Ranks(numbers), KVLedger(blocks, cpu, 4, is_exact=is_exact, states=states)
        policies = Policies(
            self.ordering,
            batcher or Greedy(8, 1000, chunked=True),
            admission or OnDemand(),
            eviction or Recompute(),
        )
        overlap = depth == 2 if overlap is None else overlap
        super().__init__(WatchedCore(Scheduler(policies, self.kv, depth=depth, overlap=overlap)))

    def preempted(self) -> list[tuple[int, Preemption]]:
        return [(event.request.id, event.how) for event in self.events if isinstance(event, Preempted)]
