from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from skipjoin.core.context import StepContext
from skipjoin.core.decide.draft import Draft
from skipjoin.core.decide.plan import StepPlanner
from skipjoin.core.events import (
    Computed,
    Event,
    Moved,
    MoveFailed,
    Planned,
    Preempted,
    Preemption,
    Released,
    Restarted,
    Waited,
)
from skipjoin.core.kv.operations import BlockLedger, CacheOperations
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.core.step import REQUEST_OF, StepPlan, StepResult
from skipjoin.core.waits import WaitReason, WaitState


class Scheduler:
    """Preemptive scheduler: `schedule(now)` plans a step, `commit(result, now)` applies its outcome.

    Args:
        depth: Maximum number of plans in flight; at most 2 with `overlap`.
        overlap: Whether a request may be scheduled while its input token is being sampled, for one device that runs
            plans back to back. Otherwise, only prompt chunks may follow each other through pipeline stages.
    """

    def __init__(
        self,
        policies: Policies,
        kv: BlockLedger,
        *,
        depth: int = 1,
        overlap: bool = False,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        if overlap and depth > 2:
            raise ValueError(
                f"depth must be at most 2 with overlap, got {depth}: an executor keeps the tokens of one plan"
            )
        self.policies = policies
        self.kv = kv
        self.depth = depth
        self.overlap = overlap
        self.events: list[Event] = []  # events since the engine core last took them
        # Wait state of the requests that the last decision did not examine.
        self.tail = WaitState(WaitReason.NOT_EXAMINED, 0.0)
        self._in_flight: deque[StepPlan] = deque()
        self._next_id = 0
        self._decisions = 0
        self.waits: dict[Request, WaitState] = {}  # of requests that the last decision examined and did not run
        self._led_since: dict[Request, float] = {}  # see `Draft`
        self._kept: set[Request] = set()  # finished, and keep their KV
        # A running request is in one of this many latest plans: `depth` with pipeline stages, where it is scheduled
        # once every `depth` plans.
        self._window = depth if not overlap else 1
        self._recent: deque[StepPlan] = deque()
        # Whether a move failed since the last decision. The next step then starts no overlapped swap-out: a request
        # that keeps retrying cannot be evicted meanwhile, and would block requests that need its blocks indefinitely.
        self._has_failed_move = False

    @property
    def latest_plan(self) -> int:
        """Id of the oldest plan whose requests still count as running."""
        return self._next_id - self._window

    @property
    def has_plans(self) -> bool:
        return bool(self._in_flight)

    @property
    def in_flight(self) -> Sequence[StepPlan]:
        return self._in_flight

    # -- requests -----------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        if self.policies.eviction.shares and self.kv.sharing is not None and request.is_best_effort:
            request.progress.fill_down()
        if self.kv.blocks_of(request) is None:
            if (cache := self.kv.cache) is not None:
                cache.await_prefix(request)
            request.progress.find(self.kv.hit(request).tokens)
        for notify in self.policies.on_arrived:
            notify(request, now)

    def remove(self, request: Request, now: float) -> None:
        """Remove a finished request, whose blocks are freed once no plan or move holds them."""
        for notify in self.policies.on_finished:
            notify(request, now)
        self._led_since.pop(request, None)
        if request.keeps_kv:
            self._kept.add(request)
        if (cache := self.kv.cache) is not None:
            cache.forget_prefix(request)
            self._lease(cache, request, now)
        self._release_if_settled(request)

    def _lease(self, cache: CacheOperations, request: Request, now: float) -> None:
        program, retention = request.options.program, self.policies.retention
        if program is None or retention is None or request.prefix is None:
            return
        if (until := retention.keep_until(request, now)) is not None:
            cache.lease(program, request, until)

    def release(self, request: Request, now: float) -> None:
        self._kept.discard(request)
        self._release_if_settled(request)
        self.events.append(Released(request, now, self.kv.device_total - self.kv.available))

    # -- planning -----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step: None if nothing can be done, an empty plan if only moves remain."""
        if len(self._in_flight) >= self.depth:
            return None
        draft = Draft(self.events, self._led_since)
        context = StepContext(
            now=now,
            plan_id=self._next_id,
            latest=self.latest_plan,
            depth=self.depth,
            overlap=self.overlap,
            may_leave=not self._has_failed_move,
            decision=self._decisions,
            in_flight=self._in_flight,
            pausing=draft.pausing,
        )
        self._has_failed_move = False
        self._decisions += 1
        if self.kv.cache is not None:
            self.kv.cache.end_leases(now)
        planner = StepPlanner(self.policies, self.kv, draft, context, self.waits)
        plan = planner.plan()
        self._note_waits(planner, now)
        # With a plan in flight, the driver waits for its result instead.
        is_empty = not (plan.slices or plan.blocking or plan.overlapped)
        if is_empty and (self._in_flight or not self.kv.is_moving):
            return None
        self._next_id += 1
        self._in_flight.append(plan)
        self._note_pauses(plan, planner.started, now)
        kv = self.kv
        held, reserved = kv.device_total - kv.device_free, kv.device_total - kv.available
        cap, shared = self.policies.batcher.cap, kv.sharing.bidirectional_blocks if kv.sharing is not None else 0
        self.events.append(Planned(plan, now, held, reserved, planner.tail, cap, shared))
        return plan

    def _note_waits(self, planner: StepPlanner, now: float) -> None:
        for request in self.waits:
            progress = request.progress
            runs = progress.last_plan == self._next_id
            if not runs and request not in planner.waits and progress.finish_reason is None:
                self.events.append(Waited(request, now, None))
        self.waits = planner.waits
        if self.tail.reason is not planner.tail:
            self.tail = WaitState(planner.tail, now)

    def _note_pauses(self, plan: StepPlan, started: int, now: float) -> None:
        self._recent.append(plan)
        if len(self._recent) <= self._window:
            return
        old = self._recent.popleft()
        if self._window == 1 and len(plan.slices) - started == len(old.slices):
            return  # all of them continue
        old_id = old.id
        for request in map(REQUEST_OF, old.slices):
            progress = request.progress
            if progress.last_plan == old_id and progress.finish_reason is None and not request.is_satisfied:
                self.events.append(Preempted(request, now, Preemption.PAUSE))

    def steady(self, live: int) -> StepPlan | None:
        """Return the plan in flight if equal steps can follow while blocks and tokens last, else None.

        It decodes all `live` requests, with nothing in transit and decode-invariant policies.
        """
        if self.depth > 1 or self.overlap or not self._in_flight or self.kv.is_moving:
            return None
        (plan,) = self._in_flight
        if len(plan.slices) != live or plan.blocking or plan.overlapped or not self.policies.is_decode_invariant:
            return None
        decodes = all(
            slice_.tokens == 1 and slice_.samples and slice_.request.progress.finish_reason is None
            for slice_ in plan.slices
        )
        return plan if decodes else None

    # -- results ------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> set[Request]:
        """Apply the outcome of the oldest plan in flight, except its tokens.

        Returns:
            Requests whose slices are void: they read KV that was lost in transit, or the executor dropped them.
        """
        if not self._in_flight or result.plan is not self._in_flight[0]:
            raise ValueError(f"plan {result.plan.id} is not the oldest in flight")
        plan = self._in_flight.popleft()
        self.events.append(Computed(result, now))
        lost = self._settle_moves(result, now)
        void = {*lost, *(plan.slices[index].request for index in result.dropped)}
        gone, cache = bool(void), self.kv.cache
        for request, start, tokens, samples, _, _ in plan.slices:
            progress = request.progress
            progress.settle(start + tokens, samples)
            if progress.finish_reason is not None:
                gone = True
            elif request.prefix is not None and cache is not None and request not in void:
                cache.offer(request)
        if (states := self.kv.states) is not None:
            states.settle(plan, self.kv.block_size, void)
        alive = plan.slices
        if gone:
            alive = tuple(
                slice_
                for slice_ in plan.slices
                if slice_.request.progress.finish_reason is None and slice_.request not in void
            )
            for slice_ in plan.slices:
                self._release_if_finished(slice_.request)
        for notify in self.policies.on_scheduled:
            notify(alive, now)
        for request, keep in lost.items():
            self._forget(request, keep, now)
        for move in (*result.completed, *result.failed):
            if move.request is not None:
                self._release_if_finished(move.request)
        return void

    def restart(self, now: float) -> None:
        self.events.append(Restarted(tuple(self._in_flight), now))
        holders = [request for request in self.kv.holders() if request.progress.finish_reason is None]
        self.kv.clear()
        self._in_flight.clear()
        self._recent.clear()
        self._has_failed_move = False
        for request in holders:
            self._drop(request, 0, now)

    def _settle_moves(self, result: StepResult, now: float) -> dict[Request, int]:
        lost: dict[Request, int] = {}
        if not (result.completed or result.failed) or (tiers := self.kv.tiers) is None:
            return lost
        settled: list[tuple[int | None, Moved | MoveFailed]] = []
        settled += [(tiers.complete(move), Moved(move, now)) for move in result.completed]
        settled += [(tiers.fail(move), MoveFailed(move, now)) for move in result.failed]
        self._has_failed_move = self._has_failed_move or bool(result.failed)
        for keep, event in settled:
            self.events.append(event)
            if keep is not None and (request := event.move.request) is not None:
                lost[request] = min(keep, lost.get(request, keep))
        return lost

    def _forget(self, request: Request, keep: int, now: float) -> None:
        if request.progress.finish_reason is not None:
            self.kv.release(request)
            return
        self.kv.drop(request, keep=keep)
        self._drop(request, self.kv.tokens_in(request, keep), now)

    def _drop(self, request: Request, kept: int, now: float) -> None:
        request.progress.rewind(kept)
        for notify in self.policies.on_preempted:
            notify(request, now)
        self.events.append(Preempted(request, now, Preemption.DROP, kept))

    def _release_if_finished(self, request: Request) -> None:
        if request.progress.finish_reason is not None:
            self._release_if_settled(request)

    def _release_if_settled(self, request: Request) -> None:
        held = self.kv.blocks_of(request)
        if held is not None and held.is_settled and not request.progress.in_flight and request not in self._kept:
            self.kv.release(request)
