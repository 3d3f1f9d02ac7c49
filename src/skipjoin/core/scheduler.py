"""The one generic preemptive scheduler. It names no policy, reads no clock and touches no tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from skipjoin.core.events import Admitted, Computed, Event, Moved, Planned, Preempted, Preemption, Started
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
    eviction_limit: a request that was evicted this often is no longer evicted to let another one in, only when
        one that already runs needs room to grow; so preemption cannot go on without end.
    """

    def __init__(
        self,
        policies: Policies,
        kv: KVLedger,
        *,
        depth: int = 1,
        overlap: bool = False,
        eviction_limit: int = 4,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.policies = policies
        self.kv = kv
        self.depth = depth
        self.overlap = overlap
        self.eviction_limit = eviction_limit
        self.events: list[Event] = []  # what happened since the engine core last took them
        self._in_flight: deque[StepPlan] = deque()
        self._next_id = 0
        # The plans in which a request that still runs must have had a slice: the last one, or with stages the
        # last `depth` ones, because a request is chosen once every `depth` plans.
        self._window = depth if not overlap else 1
        self._recent: deque[StepPlan] = deque()

    # -- the life of a request ----------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Let the request compete for the device."""
        self.policies.ordering.arrived(request, now)

    def remove(self, request: Request, now: float) -> None:
        """The request is finished or aborted (its finish_reason is set). Its blocks come home now, or when the
        last plan that holds or moves them commits."""
        self.policies.ordering.left(request, now)
        self._release_if_still(request)

    # -- deciding -----------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None when the pipeline is full or nothing can be done."""
        if len(self._in_flight) >= self.depth:
            return None
        step = _Step(self, now)
        slices = step.fill()
        before, beside = step.before, step.move_ahead()
        step.tell_ordering()
        if not slices and not before and not beside:
            return None
        plan = StepPlan(self._next_id, tuple(slices), tuple(before), tuple(beside))
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

    def commit(self, result: StepResult, now: float) -> None:
        """Apply the outcome of the oldest plan in flight: counters, moves, order. Tokens are the engine core's."""
        if not self._in_flight or result.plan is not self._in_flight[0]:
            raise ValueError(f"plan {result.plan.id} is not the oldest in flight")
        plan = self._in_flight.popleft()
        self.events.append(Computed(result, now))
        gone = False
        for request, start, tokens, samples, _, _ in plan.slices:
            request.computed = start + tokens
            if samples:
                request.awaited -= 1
            gone = gone or request.finish_reason is not None
        for move in (*plan.before, *plan.beside):
            self.kv.land(move)
            self.events.append(Moved(move, now))
            self._release_if_finished(move.request)
        alive = plan.slices
        if gone:
            alive = tuple(piece for piece in plan.slices if piece.request.finish_reason is None)
            for piece in plan.slices:
                self._release_if_finished(piece.request)
        self.policies.ordering.ran(alive, now)

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

    def fill(self) -> list[Slice]:
        """Choose the batch, best requests first."""
        slices: list[Slice] = []
        scheduler, kv = self._scheduler, self._kv
        plan_id, oldest = scheduler._next_id, scheduler._next_id - scheduler._window
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
                    continue
            take(request, verdict)
            samples = target == end
            slices.append(Slice(request, planned, verdict, samples, target > known, held.table))
            request.planned = target
            if samples:
                request.awaited += 1
            if request.last_plan < oldest:
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
        if self._holders is None:
            live = (request for request in self._kv.holders() if request.finish_reason is None)
            self._holders = sorted(live, key=self._ordering.rank)
        return self._holders

    # -- making room --------------------------------------------------------------------------------------

    def _secure(self, request: Request, held: Holding | None, target: int) -> Holding | None:
        """Device space for `target` tokens of the request, or None if it must wait."""
        if held is None:
            if self._is_below_floor(request) or (held := self._admit(request, target)) is None:
                self._closed = True
            return held
        if held.moving is not None or self._is_below_floor(request):
            return None
        if held.host:
            returned = self._return(request, len(held.host), target)
            # Newcomers ranked below would take the space that it waits for, one after the other.
            self._closed = self._closed or returned is None
            return returned
        if not self._make_room(request, self._kv.shortfall(request, target), newcomer=False):
            self._closed = True
            return None
        return self._kv.grow(request, target)

    def _admit(self, request: Request, target: int) -> Holding | None:
        """First blocks for a request that holds none."""
        promise = self._policies.reservation.admit(request, self._kv)
        if isinstance(promise, Wait):
            return None
        need = max(promise.now, promise.blocks, self._kv.blocks_for(target)) + promise.spare
        if not self._make_room(request, need - self._kv.available, newcomer=True):
            return None
        self._kv.promise(request, promise.blocks)
        self._events.append(Admitted(request, self.now))
        return self._kv.grow(request, target)

    def _return(self, request: Request, blocks: int, target: int) -> Holding | None:
        """Bring the request's KV back from the host, before the slices run."""
        need = max(blocks, self._kv.blocks_for(target))
        if not self._make_room(request, need - self._kv.available, newcomer=True):
            return None
        self.before.append(self._kv.move_in(request))
        return self._kv.grow(request, target)

    def _is_below_floor(self, request: Request) -> bool:
        """Whether somebody who matters at least as much was evicted in this step, the request itself included."""
        return self._floor is not None and self._ordering.rank(request) >= self._floor

    def _make_room(self, request: Request, short: int, *, newcomer: bool) -> bool:
        """Evict until `short` more blocks are available; evicts nobody unless that succeeds."""
        if short <= 0:
            return True
        footprint = self._kv.footprint
        candidates = self._evictable(request, newcomer=newcomer)
        still = [victim for victim in candidates if not victim.in_flight]
        if sum(map(footprint, still)) >= short:
            for victim, how in self._policies.pressure.victims(short, still, self._kv):
                self._evict(victim, how)
            return True
        if sum(map(footprint, candidates)) >= short:
            # Plans in flight hold some of them. Whoever runs in every plan could never be evicted, so they pause.
            for victim in candidates:
                if short <= 0:
                    break
                self._yielding.add(victim)
                short -= footprint(victim)
        return False

    def _evictable(self, request: Request, *, newcomer: bool) -> list[Request]:
        """Who may be evicted for the request, least important first, once no plan in flight holds them."""
        ordering, limit = self._ordering, self._scheduler.eviction_limit
        own = ordering.rank(request)
        spared: list[Request] = []
        found: list[Request] = []
        for victim in reversed(self._holders_ranked()):
            if ordering.rank(victim) <= own:
                break
            held = self._kv.holding(victim)
            if held is None or held.moving is not None or not held.device:
                continue
            if newcomer and not ordering.outranks(request, victim):
                break
            if victim.evictions >= limit:
                spared.append(victim)
            else:
                found.append(victim)
        return found if newcomer else found + spared

    def _evict(self, victim: Request, how: Preemption) -> None:
        """Take the victim's KV off the device, before the slices run."""
        rank = self._ordering.rank(victim)
        if self._floor is None or rank < self._floor:
            self._floor = rank
        self._evicted.append(victim)
        if how is Preemption.SWAP and self._kv.can_move_out(victim):
            self.before.append(self._kv.move_out(victim, before=True))
        else:
            how = Preemption.DROP
            self._kv.release(victim)
            victim.computed = victim.planned = 0
        victim.evictions += 1
        victim.last_plan = NEVER
        self._events.append(Preempted(victim, self.now, how))

    def move_ahead(self) -> list[Move]:
        """Moves beside the step, for requests that it neither runs nor moves."""
        kv = self._kv
        idle = (
            request
            for request in kv.holders()
            if not request.in_flight and request.finish_reason is None and kv.is_still(request)
        )
        out, back = self._policies.pressure.ahead(idle, kv, self.now)
        moves: list[Move] = []
        for request in out:
            if self._kv.can_move_out(request):
                moves.append(self._kv.move_out(request, before=False))
                self._evicted.append(request)
                request.last_plan = NEVER
                self._events.append(Preempted(request, self.now, Preemption.SWAP))
        moves.extend(self._kv.move_in(request) for request in back if self._kv.can_move_in(request))
        return moves

    def tell_ordering(self) -> None:
        """Tell the ordering who was evicted, now that nobody iterates over it any more."""
        for request in self._evicted:
            self._ordering.evicted(request, self.now)
