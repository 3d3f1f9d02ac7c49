from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from skipjoin.core.context import StepContext, eligible_tokens
from skipjoin.core.decide.candidates import comes_soon, find_candidates
from skipjoin.core.decide.evict import Evictor
from skipjoin.core.decide.place import Residency
from skipjoin.core.events import Event, Started, Waited
from skipjoin.core.kv.interface import BlockLedger, HeldBlocks, Tiered
from skipjoin.core.policy import BatchBuilder, Policies, Refusal, Scope
from skipjoin.core.request import Request
from skipjoin.core.selective import passing
from skipjoin.core.step import Move, Slice, StepPlan
from skipjoin.core.waits import WaitReason, WaitState

# `Slice(...)` takes twice as long, which counts because each step makes one for each request.
_new_slice: Callable[[tuple[Request, int, int, bool, bool, tuple[int, ...]]], Slice] = partial(tuple.__new__, Slice)


def begin_decision(policies: Policies, kv: BlockLedger, now: float) -> None:
    reservations = kv.reservations
    for begin in policies.on_begin:
        for account, blocks in begin(now, kv):
            if reservations is not None:
                reservations.fund(account, blocks)


class StepPlanner:
    """Starts asynchronous swaps, fills the batch in rank order and records why the others wait."""

    def __init__(self, policies: Policies, kv: BlockLedger, events: list[Event], context: StepContext) -> None:
        self.waiting: list[Request] = []
        self.tail = WaitReason.NOT_EXAMINED
        self.started = 0
        self._policies = policies
        self._kv = kv
        self._events = events
        self._context = context
        self._evictor = Evictor(policies, kv, events, context)
        self._slices: list[Slice] = []
        self._is_forced = False
        self._residency = self._new_residency()

    def plan(self) -> StepPlan:
        context, evictor = self._context, self._evictor
        begin_decision(self._policies, self._kv, context.now)
        tiers = self._kv.tiers
        overlapped = self._move_ahead(tiers) if tiers is not None and tiers.cpu_total else []
        self._fill_from_first(self._policies.batcher.open(self._with_candidates(context)))
        if not (self._slices or evictor.blocking or context.in_flight or self._kv.is_moving):
            self._restart()
        residency = self._residency
        overlapped += residency.overlapped
        # Last, because blocks that this step allocates lose their cached KV.
        if self._slices and context.may_leave and tiers is not None and (copy := tiers.keep_cached(context.depth)):
            overlapped.append(copy)
        for request in evictor.evicted:
            for notify in self._policies.on_preempted:
                notify(request, context.now)
        for request in residency.reserved:
            for notify in self._policies.on_reserved:
                notify(request, context.now)
        return StepPlan(
            context.plan_id,
            slices=tuple(self._slices),
            blocking=tuple(evictor.blocking),
            overlapped=tuple(overlapped),
            waiting_for_kv=tuple(residency.waiting_for_kv),
        )

    def _with_candidates(self, context: StepContext) -> StepContext:
        found = find_candidates(self._policies, self._kv, self._evictor, context)
        return replace(context, candidates=found, blocks_away=self._blocks_awaited)

    def _blocks_awaited(self, request: Request) -> int:
        """Return how many KV blocks a step would wait for if it ran the request."""
        return 0 if self._policies.eviction.returns_alongside(request) else self._evictor.blocks_away(request)

    def _move_ahead(self, tiers: Tiered) -> list[Move]:
        kv, context, ordering = self._kv, self._context, self._policies.ordering
        held = ((one, kv.blocks_of(one)) for one in kv.holders() if one.finish_reason is None)
        settled = [one for one, blocks in held if blocks is not None and blocks.is_settled]
        out, back = self._policies.eviction.ahead(settled, ordering, kv, context.now)
        if out or context.depth > 1 or tiers.cpu_free < tiers.cpu_total:
            ranked = ordering.ranked(context.now)
            self._residency.first = next((request for request in ranked if not request.is_satisfied), None)
        moves: list[Move] = []
        for request in out if context.may_leave else ():
            if request is self._residency.first:
                continue  # the next to run could be swapped back and forth forever
            if request.in_flight:
                context.pausing.add(request)
            elif tiers.can_move_out(request, blocking=False):
                moves.append(self._evictor.swap_ahead(request))
        for request in back:
            if tiers.can_move_in(request):
                moves.append(tiers.move_in(request))
                request.is_newly_resident = True
        return moves

    def _fill(self, queue: Iterable[Request], builder: BatchBuilder) -> Request | None:
        """Offer the queue's requests to the batch.

        Returns:
            The request at which the step was closed to newcomers, or became selective; None if there was none.
        """
        context, residency, blocks_of = self._context, self._residency, self._kv.blocks_of
        offer, take, add = builder.offer, builder.take, self._slices.append
        plan_id, latest = context.plan_id, context.latest
        was_closed, was_selective = residency.closed is not None, residency.is_selective
        for request in queue:
            held = blocks_of(request)
            meets = held is None and request.prefix is not None and residency.closed is None
            tokens = self._meet(request) if meets else eligible_tokens(request, context)
            if not tokens:
                self._pass_over(request)
            elif held is None and residency.closed is not None:
                self._wait(request, residency.closed)
            elif isinstance(verdict := offer(request, tokens), int):
                start = request.planned
                target = start + verdict
                if held is None or target > held.room:
                    held = self._secure(request, held, target, builder)
                if held is not None:
                    take(request, verdict)
                    samples = verdict == tokens  # the slice ends at the last known or awaited token
                    add(_new_slice((request, start, verdict, samples, target > request.known, held.table)))
                    request.planned = target
                    request.pending_samples += samples
                    request.wait = None
                    if request.last_plan < latest:
                        self.started += 1
                        self._events.append(Started(request, context.now))
                    request.last_plan = plan_id
            elif self._refuse(request, verdict) is Scope.ALL:
                if meets:
                    request.computed = request.planned = 0
                return None
            if meets and held is None and blocks_of(request) is None:
                request.computed = request.planned = 0
            if residency.closed is not None and not was_closed:
                self.tail = residency.closed
                return request
            if residency.is_selective and not was_selective:
                self.tail = WaitReason.BEHIND_MEMORY
                return request
        return None

    def _meet(self, request: Request) -> int:
        """Credit prefix-cache hits; return the eligible tokens, 0 if the request waits for a prefix."""
        hit = self._kv.hit(request)
        if not self._is_forced and comes_soon(request, hit, self._context, self._policies.ordering):
            self._wait(request, WaitReason.BEHIND_PREFIX)
            return 0
        request.computed = request.planned = hit.tokens
        return eligible_tokens(request, self._context)

    def _new_residency(self) -> Residency:
        return Residency(
            self._policies, self._kv, self._events, self._context, evictor=self._evictor, slices=self._slices
        )

    def _fill_from_first(self, builder: BatchBuilder) -> None:
        last = self._fill(self._policies.ordering.ranked(self._context.now), builder)
        # Skip the long queue: only holders can still run, and newcomers that the admission policy does not pass over.
        if last is not None and self._residency.closed is None:
            last = self._fill(passing(self._policies, self._kv, self._evictor.holders_after(last)), builder)
        if last is not None:
            self._fill(self._evictor.holders_after(last), builder)

    def _restart(self) -> None:
        """Restart an empty batch without candidates, because the earlier candidates found no space."""
        before, self._residency = self._residency, self._new_residency()
        self._residency.first, self._residency.reserved = before.first, before.reserved
        self._residency.overlapped = before.overlapped
        self._context.pausing.clear()  # no plan in flight delays their eviction
        self.waiting.clear()
        builder = self._policies.batcher.open(self._context)
        self._fill_from_first(builder)
        if not (self._slices or self._evictor.blocking):
            self._force(builder)

    def _force(self, builder: BatchBuilder) -> None:
        """Run the first request that the batcher accepts, whatever the other policies decide.

        Every other request can be evicted, except where another engine still reads or writes blocks
        (`Request.keeps_kv`, `Incoming`).
        """
        self._is_forced = True
        if (reservations := self._kv.reservations) is not None:
            reservations.disband()
        for request in self._policies.ordering.ranked(self._context.now):
            self._residency.force()
            self._fill((request,), builder)
            if self._slices:
                return

    def _secure(
        self, request: Request, held: HeldBlocks | None, target: int, builder: BatchBuilder
    ) -> HeldBlocks | None:
        found = self._residency.secure(request, held, target)
        if isinstance(found, WaitReason):
            self._wait(request, found, self._residency.short)
            if request is self._residency.coming:
                builder.take(request, target - request.planned)
            return None
        return found

    def _refuse(self, request: Request, refusal: Refusal) -> Scope:
        self._wait(request, refusal.reason)
        if refusal.scope is Scope.ALL:
            self.tail = refusal.reason
        elif refusal.scope is Scope.NEWCOMERS:
            self._residency.closed = self._residency.closed or refusal.reason
        return refusal.scope

    # -- waiting ------------------------------------------------------------------------------------------

    def _pass_over(self, request: Request) -> None:
        waits = request.examined == self._context.decision
        if not (request.in_flight or request.is_satisfied or waits):
            self._wait(request, WaitReason.GRAMMAR if request.awaits_grammar else WaitReason.HELD_BY_EVICTION)

    def _wait(self, request: Request, reason: WaitReason, short: int = 0) -> None:
        if request.in_flight:
            return
        self.waiting.append(request)
        request.examined = self._context.decision
        wait = request.wait
        if wait is None or wait.reason is not reason:
            request.wait = WaitState(reason, self._context.now, short)
            self._events.append(Waited(request, self._context.now, reason, short))
