"""The one generic preemptive scheduler. It names no policy, reads no clock and touches no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from skipjoin.core.events import (
    Admitted,
    Computed,
    Event,
    Moved,
    MoveFailed,
    Planned,
    Preempted,
    Preemption,
    Started,
)
from skipjoin.core.kv import Holding, KVLedger
from skipjoin.core.policy import Policies, Refusal, Wait
from skipjoin.core.request import NEVER, Request
from skipjoin.core.step import Move, Slice, StepPlan, StepResult


class Scheduler:
    """Turns requests into plans: `schedule(now)` decides a step, `commit(result, now)` applies its outcome.

    policies: what makes this a particular serving system. kv: the ledger, which the scheduler alone changes.
    depth: plans that may be in flight at once, at least 1.
    overlap: whether a request may be in several plans in flight, its input token still being sampled (one device
        that runs plans back to back). Without it such a request keeps its place but cannot be chosen again until
        its plan commits (pipeline stages).
    """

    def __init__(
        self,
        policies: Policies,
        kv: KVLedger,
        *,
        depth: int = 1,
        overlap: bool = False,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.policies = policies
        self.kv = kv
        self.depth = depth
        self.overlap = overlap
        self.events: list[Event] = []  # what happened since the engine core last took them
        self._in_flight: deque[StepPlan] = deque()
        self._next_id = 0
        # The plans in which a request that still runs must have had a slice: the last one, or with stages the
        # last `depth` ones, because a request is chosen once every `depth` plans.
        self._window = depth if not overlap else 1
        self._recent: deque[StepPlan] = deque()
        # Whether a move failed since the last decision. Nobody then leaves beside the next step: who keeps trying, and
        # cannot be evicted meanwhile, would hold up those that need its blocks for ever.
        self._has_failed_move = False

    @property
    def latest_plan(self) -> int:
        """A request whose last slice was in this plan or a later one runs."""
        return self._next_id - self._window

    # -- the life of a request ----------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Let the request compete for the device."""
        self.policies.ordering.arrived(request, now)
        self.policies.pressure.arrived(request, now)

    def remove(self, request: Request, now: float) -> None:
        """The request is finished or aborted (its finish_reason is set). Its blocks come home now, or when the
        last plan that holds or moves them commits."""
        self.policies.ordering.left(request, now)
        self._release_if_still(request)

    # -- deciding -----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None when the pipeline is full or nothing can be done. Where all that can be done is to
        wait for moves, the plan is empty."""
        if len(self._in_flight) >= self.depth:
            return None
        step = _Step(self, now)
        beside = step.move_ahead()
        self._has_failed_move = False
        slices, before = step.fill(), step.before
        step.tell_ordering()
        # With a plan in flight, its result is what to wait for.
        if not (slices or before or beside) and (self._in_flight or not self.kv.is_moving):
            return None
        plan = StepPlan(self._next_id, tuple(slices), tuple(before), tuple(beside), tuple(step.absent))
        self._next_id += 1
        self._in_flight.append(plan)
        self._note_pauses(plan, now)
        kv = self.kv
        self.events.append(Planned(plan, now, kv.device_total - kv.device_free, kv.device_total - kv.available))
        return plan

    def _note_pauses(self, plan: StepPlan, now: float) -> None:
        """Report the requests that ran until now and were passed over in this plan."""
        self._recent.append(plan)
        if len(self._recent) <= self._window:
            return
        old = self._recent.popleft()
        for piece in old.slices:
            request = piece.request
            if request.last_plan == old.id and request.finish_reason is None and not request.is_satisfied:
                self.events.append(Preempted(request, now, Preemption.PAUSE))

    # -- settling -----------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> set[Request]:
        """Apply the outcome of the oldest plan in flight: counters, moves, order. Tokens are the engine core's.

        Returns the requests whose slices count for nothing, because the KV that they read was lost on its way.
        """
        if not self._in_flight or result.plan is not self._in_flight[0]:
            raise ValueError(f"plan {result.plan.id} is not the oldest in flight")
        plan = self._in_flight.popleft()
        self.events.append(Computed(result, now))
        lost = self._settle_moves(result, now)
        gone = bool(lost)
        for request, start, tokens, samples, _, _ in plan.slices:
            request.computed = start + tokens
            if samples:
                request.awaited -= 1
                request.is_fresh = False
            gone = gone or request.finish_reason is not None
        alive = plan.slices
        if gone:
            alive = tuple(
                piece for piece in plan.slices if piece.request.finish_reason is None and piece.request not in lost
            )
            for piece in plan.slices:
                self._release_if_finished(piece.request)
        self.policies.ordering.ran(alive, now)
        for move in result.failed:  # in an order that repeats
            if move.request in lost:
                self._forget(move.request, now)
        for move in (*result.landed, *result.failed):
            self._release_if_finished(move.request)
        return lost

    def _settle_moves(self, result: StepResult, now: float) -> set[Request]:
        """Lift the fences of the moves that ended; whose KV was lost."""
        lost: set[Request] = set()
        for move in result.landed:
            self.kv.land(move)
            self.events.append(Moved(move, now))
        for move in result.failed:
            self._has_failed_move = True
            self.events.append(MoveFailed(move, now))
            if not self.kv.fail(move):
                lost.add(move.request)
        return lost

    def _forget(self, request: Request, now: float) -> None:
        """The request's KV was lost on its way: compute it again. No other plan holds it, as it was in transit."""
        self.kv.release(request)
        request.computed = request.planned = 0
        request.last_plan = NEVER
        if request.finish_reason is None:
            self.policies.ordering.evicted(request, now)
            self.events.append(Preempted(request, now, Preemption.DROP))

    def _release_if_finished(self, request: Request) -> None:
        if request.finish_reason is not None:
            self._release_if_still(request)

    def _release_if_still(self, request: Request) -> None:
        if self.kv.is_still(request) and not request.in_flight:
            self.kv.release(request)


class _Step:
    """One step while it is being decided."""

    def __init__(self, scheduler: Scheduler, now: float) -> None:
        self.now = now
        self.before: list[Move] = []
        self.absent: list[Request] = []
        self._taken = 0  # device blocks of those who run
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._policies = scheduler.policies
        self._ordering = scheduler.policies.ordering
        self._events = scheduler.events
        self._closed = False  # nobody new gets in
        self._evicted: list[Request] = []
        self._floor: Any = None  # rank below which nobody takes new space, once somebody was evicted
        self._holders: list[Request] | None = None  # best first; sorted when first needed
        self._yielding: set[Request] = set()  # not run in this step, to be evicted once no plan holds them
        self._owed = 0  # blocks that requests passed over while their KV is on the host need to come back
        self._first: Request | None = None  # who matters most, where something depends on it
        self._first_waits = False  # for space, with plans in flight

    def move_ahead(self) -> list[Move]:
        """Begin moves beside the step, of requests that then cannot join it."""
        kv = self._kv
        if not kv.host_total:
            return []
        still = [request for request in kv.holders() if request.finish_reason is None and kv.is_still(request)]
        pressure = self._policies.pressure
        out, back = pressure.ahead(still, self._ordering, kv, self.now)
        if out or pressure.returns_beside or self._scheduler.depth > 1:
            self._first = next((one for one in self._ordering.ranked(self.now) if not one.is_satisfied), None)
        moves: list[Move] = []
        for request in () if self._scheduler._has_failed_move else out:
            if request is self._first:
                continue  # its turn has come: it could be moved back and forth and never run
            if request.in_flight:
                self._yielding.add(request)
            elif kv.can_move_out(request):
                moves.append(kv.move_out(request, before=False))
                self._evicted.append(request)
                request.last_plan = NEVER
                self._events.append(Preempted(request, self.now, Preemption.SWAP))
        for request in back:
            if kv.can_move_in(request):
                moves.append(kv.move_in(request))
                request.is_fresh = True
        return moves

    def fill(self) -> list[Slice]:
        """Choose the batch, best requests first."""
        slices: list[Slice] = []
        scheduler, kv = self._scheduler, self._kv
        plan_id, latest = scheduler._next_id, scheduler.latest_plan
        overlap, yielding = scheduler.overlap, self._yielding
        packing = self._policies.batcher.open(self.now)
        offer, take, holding = packing.offer, packing.take, kv.holding
        for request in self._candidates():
            planned = request.planned
            known = request.known
            end = known + request.awaited
            # Nothing to do: all it may generate is on its way, or a plan in flight holds it.
            if end >= request.limit or (planned > request.computed and not overlap):
                continue
            held = holding(request)
            if (held is None and self._closed) or request in yielding:
                continue
            verdict = offer(request, end - planned)
            if not isinstance(verdict, int):
                if verdict is Refusal.STOP:
                    break
                self._closed = self._closed or verdict is Refusal.CLOSE
                continue
            target = planned + verdict
            if held is None or held.moving is not None or target > held.room:
                held = self._secure(request, held, target)
                if held is None:
                    self._first_waits = self._first_waits or (request is self._first and scheduler.depth > 1)
                    continue
            take(request, verdict)
            self._taken += len(held.table)
            samples = target == end
            slices.append(Slice(request, planned, verdict, samples, target > known, held.table))
            request.planned = target
            if samples:
                request.awaited += 1
            if request.last_plan < latest:
                self._events.append(Started(request, self.now))
            request.last_plan = plan_id
        return slices

    def _candidates(self) -> Iterator[Request]:
        """All requests best first; from the moment the step is closed to newcomers, only the holders of KV, so
        that a long queue behind a full device costs nothing."""
        last = None
        for request in self._ordering.ranked(self.now):
            yield request
            if self._closed:
                last = request
                break
        if last is not None:
            rank = self._ordering.rank
            floor = rank(last)
            yield from (request for request in self._holders_ranked() if rank(request) > floor)

    def _holders_ranked(self) -> list[Request]:
        """The holders that this step may run or evict, best first."""
        if self._holders is None:
            holding, passes_over = self._kv.holding, self._policies.pressure.returns_beside
            able = []
            for request in self._kv.holders():
                held = holding(request)
                if held is None or held.moving is not None or request.finish_reason is not None:
                    continue
                if held.device or not passes_over:
                    able.append(request)
            self._holders = sorted(able, key=self._ordering.rank)
        return self._holders

    # -- making room --------------------------------------------------------------------------------------

    def _secure(self, request: Request, held: Holding | None, target: int) -> Holding | None:
        """Device space for `target` tokens of the request, or None if it must wait."""
        if held is None:
            if self._is_below_floor(request) or (held := self._admit(request, target)) is None:
                self._closed = True
            return held
        if held.moving is not None:
            self._miss(request, len(held.host))
            return None
        # Who matters most does not wait for moves beside steps: the space that they need may never be left over.
        if held.host and self._policies.pressure.returns_beside and request is not self._first:
            self._owed += len(held.host)
            self._miss(request, 0)
            return None
        if self._is_below_floor(request):
            return None
        if held.host:
            # Who comes back is spared until the plan commits that runs it: with others in flight there would always be
            # somebody whom the first may not evict.
            returned = None if self._first_waits else self._return(request, len(held.host), target)
            # Newcomers ranked below would take the space that it waits for, one after the other.
            self._closed = self._closed or returned is None
            return returned
        if not self._make_room(request, self._kv.shortfall(request, target), newcomer=False):
            self._closed = True
            return None
        return self._kv.grow(request, target)

    def _miss(self, request: Request, blocks: int) -> None:
        """The request is passed over because its KV is not on the device. blocks: its own that are in transit."""
        if request.in_flight:  # its KV arrives just before the slices of a plan that has not committed
            return
        if self._taken + self._owed + blocks <= self._kv.device_total:
            self.absent.append(request)
        else:
            # Those who matter more than everybody from here on fill the device.
            self._closed = True

    def _admit(self, request: Request, target: int) -> Holding | None:
        """First blocks for a request that holds none."""
        promise = self._policies.reservation.admit(request, self._kv)
        if isinstance(promise, Wait):
            return None
        need = max(promise.now, promise.blocks, self._kv.blocks_for(target)) + promise.spare
        # Who matters more and is on its way back from the host comes first to what is free.
        if not self._make_room(request, need - max(0, self._kv.available - self._owed), newcomer=True):
            return None
        self._kv.promise(request, promise.blocks)
        self._events.append(Admitted(request, self.now))
        request.is_fresh = True
        return self._kv.grow(request, target)

    def _return(self, request: Request, blocks: int, target: int) -> Holding | None:
        """Bring the request's KV back from the host, before the slices run."""
        need = max(blocks, self._kv.blocks_for(target))
        if not self._make_room(request, need - self._kv.available, newcomer=True):
            return None
        self.before.append(self._kv.move_in(request))
        request.is_fresh = True
        return self._kv.grow(request, target)

    def _is_below_floor(self, request: Request) -> bool:
        """Whether somebody who matters at least as much was evicted in this step, the request itself included."""
        return self._floor is not None and self._ordering.rank(request) >= self._floor

    def _make_room(self, request: Request, short: int, *, newcomer: bool) -> bool:
        """Evict until `short` more blocks are available; evicts nobody unless that succeeds."""
        if short <= 0:
            return True
        footprint, pressure = self._kv.footprint, self._policies.pressure
        candidates = self._evictable(request, newcomer=newcomer)
        still = [victim for victim in candidates if not victim.in_flight]
        comes = request if newcomer else None
        if sum(map(footprint, still)) >= short:
            victims = pressure.victims(short, still, self._kv, self.now, comes)
            dropped = sum(self._evict(victim, how) for victim, how in victims)
            if newcomer and dropped:
                pressure.dropped(dropped, self.now)
            return bool(victims)
        if sum(map(footprint, candidates)) >= short:
            # Plans in flight hold some of them. Whoever runs in every plan could never be evicted, so they pause.
            victims = pressure.victims(short, candidates, self._kv, self.now, comes)
            self._yielding.update(victim for victim, _ in victims)
        return False

    def _evictable(self, request: Request, *, newcomer: bool) -> list[Request]:
        """Who may be evicted for the request, least important first, once no plan in flight holds them.

        Who runs has generated a token since it got its KV before it makes way for a newcomer: so every eviction of
        one that runs is paid for by progress, and requests cannot throw each other out in turn for nothing.
        """
        ordering, latest = self._ordering, self._scheduler.latest_plan
        own = ordering.rank(request)
        found: list[Request] = []
        for victim in reversed(self._holders_ranked()):
            if ordering.rank(victim) <= own:
                break
            held = self._kv.holding(victim)
            if held is None or held.moving is not None or not held.device:
                continue
            if newcomer:
                if not ordering.outranks(request, victim):
                    break
                if victim.is_fresh and victim.last_plan >= latest:
                    continue
            found.append(victim)
        return found

    def _evict(self, victim: Request, how: Preemption) -> int:
        """Take the victim's KV off the device, before the slices run; of how many tokens it is dropped."""
        dropped = 0
        rank = self._ordering.rank(victim)
        if self._floor is None or rank < self._floor:
            self._floor = rank
        self._evicted.append(victim)
        if how is Preemption.SWAP and self._kv.can_move_out(victim):
            self.before.append(self._kv.move_out(victim, before=True))
        else:
            how, dropped = Preemption.DROP, victim.computed
            self._kv.release(victim)
            victim.computed = victim.planned = 0
        victim.evictions += 1
        victim.last_plan = NEVER
        self._events.append(Preempted(victim, self.now, how))
        return dropped

    def tell_ordering(self) -> None:
        """Tell the ordering who was evicted, now that nobody iterates over it any more."""
        for request in self._evicted:
            self._ordering.evicted(request, self.now)
