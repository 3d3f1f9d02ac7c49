from __future__ import annotations

import traceback
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from core_fuzz.device import POISON, Device, FindingError, salted
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Finished
from skipjoin.core.forecast import Forecast
from skipjoin.core.foreign import ForeignScheduler
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import FinishReason, ProgramId, Request, RequestOptions, ServiceClass
from skipjoin.core.step import Direction, Move, StepPlan
from skipjoin.options import Value
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Share
from support import policies as test_policies
from support import watch

STEP_S = 0.01
# Eviction policies that a world may have instead of its recipe's.
EVICTIONS = test_policies.EVICTIONS | {
    "patchwork": lambda: test_policies.Patchwork(1),
    "share": lambda: Share(test_policies.COST),
}
# Settings that worlds of other tests have, too.
SHARED = (
    *("depth", "overlap", "stages", "device_blocks", "cpu_blocks", "block_size", "max_seqs", "max_tokens"),
    *("best_effort_wait_s", "is_exact", "params"),
)
# Number of plans in which all requests must finish once there are no more faults, and more of them for each token.
MAX_PLANS, MAX_PLANS_PER_TOKEN = 500, 10


@dataclass(frozen=True)
class World:
    recipe: str
    depth: int = 1
    overlap: bool = False
    stages: int = 1
    device_blocks: int = 10
    cpu_blocks: int = 0
    block_size: int = 4
    max_seqs: int = 8
    max_tokens: int = 64
    best_effort_wait_s: float = 60.0
    fair: bool = False
    is_exact: bool = True
    voids: bool = False  # see `Device`
    cost: tuple[float, ...] = (0.01, 1e-3, 1e-7, 1e-4, 1e-7, 5e-4, 5e-4)
    params: tuple[tuple[str, Value], ...] = ()
    eviction: str = ""  # one of `EVICTIONS`, or empty for the recipe's own

    def core(self) -> EngineCore:
        """Return an engine core of this world. Raises ValueError if the settings are invalid."""
        world = watch.World(
            self.recipe,
            eviction=EVICTIONS[self.eviction] if self.eviction else None,
            fair_output_weight=2.0 if self.fair else None,
            cost=LinearCost(*self.cost),
            **{name: getattr(self, name) for name in SHARED},
        )
        kv = KVLedger(self.device_blocks, self.cpu_blocks, self.block_size, is_exact=self.is_exact)
        return EngineCore(ForeignScheduler(world.policies(), kv, depth=self.depth, overlap=self.overlap))


class Ask(NamedTuple):
    """A request.

    Args:
        text: Which text its prompt begins with, and the number of tokens of it; the others are its own.
        salt: Requests with the same salt share KV; None shares with none.
        forecast: Expected output tokens; 0 stands for no forecast.
        resumed: Number of output tokens that it arrives with.
    """

    id: int
    prompt: int
    max_tokens: int
    text: tuple[int, int] = (0, 0)
    salt: int | None = None
    best_effort: bool = False
    priority: int = 0
    urgent: bool = False
    forecast: float = 0.0
    deadline_s: float | None = None
    client: str = ""
    stops: bool = False
    resumed: int = 0
    keeps_kv: bool = False
    program: str = ""

    def tokens(self) -> list[int]:
        which, common = self.text
        common = min(common, self.prompt)
        own = 1000 * (self.id + 1)
        return [*range(100 * which, 100 * which + common), *range(own, own + self.prompt - common)]

    def request(self, now: float, block_size: int) -> Request:
        options = RequestOptions(
            service=ServiceClass.BEST_EFFORT if self.best_effort else ServiceClass.REAL_TIME,
            is_urgent=self.urgent,
            priority=self.priority,
            deadline_s=self.deadline_s,
            client=self.client,
            program=ProgramId(self.client, self.program) if self.program else None,
        )
        request = Request(
            self.id,
            now,
            self.tokens(),
            self.max_tokens,
            stop_tokens=frozenset({0}) if self.stops else frozenset(),
            options=options,
            prefix=None if self.salt is None else ContentPrefix(block_size, salted(self.salt)),
            resumed=range(1, 1 + self.resumed),
            keeps_kv=self.keeps_kv,
        )
        request.progress.expect(Forecast(self.forecast, "fuzz") if self.forecast else None)
        return request


class Add(NamedTuple):
    ask: Ask


class Expect(NamedTuple):
    """Expect the KV of a request from another engine, if there is room."""

    ask: Ask


class Start(NamedTuple):
    """Start one plan, or with `fills` as many as the core makes."""

    fills: bool = True


class Finish(NamedTuple):
    """Finish the oldest plan in flight.

    Args:
        fails_slices: Ids of requests whose slices fail.
        fails: Ids of requests whose moves fail if they end now; None stands for the prefix cache.
        held: See `Device.run`.
    """

    seconds: float = STEP_S
    fails_slices: tuple[int, ...] = ()
    fails: tuple[int | None, ...] = ()
    held: int = 0


class Abort(NamedTuple):
    id: int


class Reforecast(NamedTuple):
    id: int
    tokens: float


class Release(NamedTuple):
    id: int


class Pass(NamedTuple):
    seconds: float


class Restart(NamedTuple):
    """Restart the executor."""


Call = Add | Expect | Start | Finish | Abort | Reforecast | Release | Pass | Restart


@dataclass(frozen=True)
class Case:
    world: World
    calls: tuple[Call, ...]


class Machine:
    """An engine core with a model of the device. Calls that no longer make sense after shrinking do nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.core = world.core()
        self.now = 0.0
        self.plans: deque[StepPlan] = deque()
        self.expected: dict[int, Request] = {}
        self.kept: dict[int, Request] = {}
        self.asked: dict[int, Ask] = {}
        self._may_end: dict[int, set[FinishReason]] = {}
        self.reads = 0
        self.trace = 0  # hash of all plans
        self._device = Device(self.core.kv, is_exact=world.is_exact, voids=world.voids)  # type: ignore[arg-type]
        self._has_prefixes = False

    # -- calls --------------------------------------------------------------------------------------------

    def call(self, call: Call) -> None:
        """Make a call. Raises `FindingError`."""
        try:
            self._call(call)
            if isinstance(call, Finish | Restart):  # these free blocks, or show corruption of earlier calls
                self.core.kv.check()  # type: ignore[attr-defined]
        except FindingError:
            raise
        except Exception as error:
            raise crash(error) from error

    def _call(self, call: Call) -> None:
        match call:
            case Start(fills):
                while self._start() is not None and fills:
                    pass
            case Finish():
                if self.plans:
                    self._finish(call)
            case Add(ask):
                self._add(ask)
            case Expect(ask):
                self._expect(ask)
            case Pass(seconds):
                self.now += seconds
            case Restart():
                self._restart()
            case Abort() | Reforecast() | Release():
                self._call_for_request(call)
        self._take_events()

    def _call_for_request(self, call: Abort | Reforecast | Release) -> None:
        number = call.id
        match call:
            case Abort():
                if self.core.abort(number, self.now):
                    self._may_end[number] = {FinishReason.ABORT}
            case Reforecast(tokens=tokens):
                self.core.reforecast(number, Forecast(tokens, "fuzz"), self.now)
            case Release():
                if (request := self.kept.pop(number, None)) is not None:
                    self.core.release(request, self.now)

    def _add(self, ask: Ask) -> None:
        request = self.expected.pop(ask.id, None)
        if request is None:
            if ask.id in self.asked or ask.prompt + ask.max_tokens > self.core.largest_request:
                return
            request = self._request(ask)
        if request.prefix is not None:
            self._has_prefixes = True
        # The direction in which a request fills its blocks is known once it is added.
        self.core.add(request, self.now)
        self._device.meet(request, self.asked[ask.id].salt or 0)
        if request.progress.computed:
            self._device.fill(request)

    def _request(self, ask: Ask) -> Request:
        self.asked[ask.id] = ask
        reasons = self._may_end[ask.id] = {FinishReason.LENGTH}
        if ask.stops:
            reasons.add(FinishReason.STOP)
        if ask.deadline_s is not None:
            reasons.add(FinishReason.DEADLINE)
        request = ask.request(self.now, self.world.block_size)
        return request

    def _expect(self, ask: Ask) -> None:
        if ask.id in self.asked or ask.prompt + ask.max_tokens > self.core.largest_request or not ask.resumed:
            return
        request = self._request(ask)
        request.progress.computed = request.progress.planned = request.progress.known - 1
        if self.core.scheduler.expect(request, self.now):
            self.expected[ask.id] = request
        else:
            del self.asked[ask.id], self._may_end[ask.id]

    def _start(self) -> StepPlan | None:
        core = self.core
        plan = core.start_step(self.now)
        self._take_events()  # a deadline may have passed
        if plan is None:
            # Requests that wait for KV transfers of other engines depend on the driver.
            if not (self.plans or self.expected or self.kept) and core.requests:
                raise FindingError("stall", f"nothing is in flight, and requests {list(core.requests)} wait")
            return None
        self.plans.append(plan)
        if not (plan.slices or plan.blocking or plan.overlapped or core.kv.is_moving):
            raise FindingError("empty plan", f"plan {plan.id} has no effect")
        for piece in plan.slices:
            if piece.request.progress.finish_reason is not None:
                raise FindingError("finished", f"plan {plan.id} runs request {piece.request.id}, which is finished")
        self.trace = hash((self.trace, plan.id, *((s.request.id, *s[1:]) for s in plan.slices)))
        return plan

    def _finish(self, call: Finish) -> None:
        self.now += call.seconds
        core, device, plan = self.core, self._device, self.plans.popleft()
        fails = set(call.fails)

        def does_fail(move: Move) -> bool:
            return (None if move.request is None else move.request.id) in fails

        result = device.run(plan, call.seconds, fails_slices=call.fails_slices, fails=does_fail, held=call.held)
        live = [piece.request.progress.finish_reason is None for piece in plan.slices]
        for index in result.dropped:
            if live[index]:
                self._may_end[plan.slices[index].request.id] = {FinishReason.ERROR}
        core.finish_step(result, self.now)
        for index, piece in enumerate(plan.slices):
            request, end = piece.request, piece.start + piece.tokens
            self.reads += piece.start
            if not live[index] or index in result.dropped:
                if live[index] and request.progress.finish_reason is not FinishReason.ERROR:
                    raise FindingError("failed slice", f"request {request.id} goes on after its slice failed")
                continue
            if index in device.tainted:
                if request.progress.finish_reason is None and request.progress.computed >= end:
                    raise FindingError("wrong read", f"plan {plan.id} is committed: {device.tainted[index]}")
                if request.progress.output and request.progress.output[-1] == POISON:
                    raise FindingError("wrong token", f"request {request.id}: {device.tainted[index]}")
            elif piece.samples and request.progress.computed >= end and request.progress.known != end + 1:
                raise FindingError(
                    "lost token", f"request {request.id} knows {request.progress.known} tokens after plan {plan.id}"
                )
        if self._has_prefixes:
            device.check_keys()

    def _restart(self) -> None:
        self.plans.clear()
        self._device.clear()
        self.core.restart(self.now)

    def _take_events(self) -> None:
        for event in self.core.take_events():
            if isinstance(event, Finished):
                self._end(event.request, event.reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.keeps_kv:
            self.kept[request.id] = request
        reasons = self._may_end.pop(request.id, None)
        if reasons is None:
            raise FindingError("finished twice", f"request {request.id}")
        is_whole = request.progress.known == request.max_total_tokens
        if reason not in reasons or (is_whole != (reason is FinishReason.LENGTH) and reason is not FinishReason.STOP):
            raise FindingError(
                "wrong end", f"request {request.id} finished with {reason} after {len(request.progress.output)} tokens"
            )

    # -- end of a run -------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Run without faults until all requests finish, and check that no block is held. Raises `FindingError`."""
        self.call(Start())
        for number in [*self.expected]:
            self.call(Add(Ask(number, 1, 1)))
            self.call(Start())
        tokens = sum(request.max_total_tokens for request in self.core.requests.values())
        plans = MAX_PLANS + MAX_PLANS_PER_TOKEN * tokens
        while self.plans or self.kept:
            if not plans:
                raise FindingError("endless", f"requests {list(self.core.requests)} do not finish")
            plans -= 1
            for number in [*self.kept]:
                self.call(Release(number))
            self.call(Finish())
            self.call(Start())
        self._check_end()

    def _check_end(self) -> None:
        kv = self.core.kv
        assert isinstance(kv, KVLedger)
        if self._may_end:
            raise FindingError("lost request", f"requests {[*self._may_end]} never finished")
        if holders := list(kv.holders()):
            raise FindingError("leak", f"finished requests {[request.id for request in holders]} hold KV")
        copied = kv.tiers.blocks_in_transit[Direction.OUT]
        if (kv.device_free, kv.tiers.cpu_free + copied) != (kv.device_total, kv.tiers.cpu_total):
            raise FindingError("leak", f"{kv.device_free} device blocks and {kv.tiers.cpu_free} CPU blocks are free")
        if kv.cache.awaited or kv.cache._announced or kv.cache._coming:
            raise FindingError("leak", "the prefix cache keeps finished requests")


def crash(error: Exception) -> FindingError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "skipjoin" in frame.filename]
    place = frames[-1].name if frames else "?"
    finding = FindingError(f"{type(error).__name__} in {place}", str(error))
    return finding


def replay(case: Case) -> FindingError | None:
    try:
        machine = Machine(case.world)
    except ValueError:
        return None
    try:
        for call in case.calls:
            machine.call(call)
        machine.drain()
    except FindingError as finding:
        return finding
    return None
