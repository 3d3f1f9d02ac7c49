from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice

from skipjoin.core.context import StepContext, eligible_tokens
from skipjoin.core.decide.candidates import comes_soon, find_candidates
from skipjoin.core.decide.draft import Draft
from skipjoin.core.decide.evict import Evictor
from skipjoin.core.decide.lazy import LazySequence
from skipjoin.core.decide.place import Blocked, Placer
from skipjoin.core.events import Started, Waited
from skipjoin.core.kv.operations import BlockLedger, TierOperations
from skipjoin.core.policy import BatchBuilder, CountingBuilder, Deferral
from skipjoin.core.policy_set import Policies
from skipjoin.core.refusals import Refusal, Scope
from skipjoin.core.request import Request
from skipjoin.core.selective import finds_by_needs, passing
from skipjoin.core.step import Slice, StepPlan
from skipjoin.core.waits import WaitReason, WaitState


def begin_decision(policies: Policies, kv: BlockLedger, now: float) -> None:
    reservations = kv.reservations
    for begin in policies.on_begin:
        for account, blocks in begin(now, kv):
            if reservations is not None:
                reservations.fund(account, blocks)


def _grows_not(request: Request, tokens: int) -> bool:
    return False


class StepPlanner:
    """Starts asynchronous swaps, fills the batch in rank order and records why the others wait."""

    def __init__(
        self,
        policies: Policies,
        kv: BlockLedger,
        draft: Draft,
        context: StepContext,
        before: Mapping[Request, WaitState],
    ) -> None:
        self.waits: dict[Request, WaitState] = {}  # examined, and not run
        self.tail = WaitReason.NOT_EXAMINED  # of requests that were not examined
        self.started = 0  # number of requests that join the running ones
        self._policies = policies
        self._kv = kv
        self._context = context
        self._draft = draft
        self._before = before
        self._evictor = Evictor(policies, kv, context, self._draft)
        self._placer = self._new_placer()
        self._closed: WaitReason | None = None  # why no more requests without KV are admitted in this step
        self._is_selective = False  # whether only those are admitted that the ordering finds by their needs
        self._finds_holders = finds_by_needs(policies.admission)
        self._is_forced = False

    def plan(self) -> StepPlan:
        context, draft = self._context, self._draft
        begin_decision(self._policies, self._kv, context.now)
        tiers = self._kv.tiers
        if tiers is not None and tiers.cpu_total:
            self._move_ahead(tiers)
        self._fill_from_first(self._policies.batcher.open(self._with_candidates(context)))
        if not (draft.slices or draft.blocking or context.in_flight or self._kv.is_moving):
            self._restart()
        # Last, because blocks that this step allocates lose their cached KV.
        if draft.slices and context.may_leave and tiers is not None and (copy := tiers.keep_cached(context.depth)):
            draft.overlapped.append(copy)
        self._notify()
        states = self._kv.states
        return StepPlan(
            context.plan_id,
            slices=tuple(draft.slices),
            blocking=tuple(draft.blocking),
            overlapped=tuple(draft.overlapped),
            waiting_for_kv=tuple(draft.waiting_for_kv),
            states=states.plan(draft.slices, self._kv.block_size) if states is not None else None,
        )

    def _notify(self) -> None:
        draft, policies, kv, now = self._draft, self._policies, self._kv, self._context.now
        for request in draft.evicted if kv.cache is not None else ():
            if kv.blocks_of(request) is None:  # dropped, and this step has taken some of its blocks
                request.progress.find(kv.hit(request).tokens)
        for requests, callbacks in ((draft.deferred, policies.on_deferred), (draft.evicted, policies.on_preempted)):
            for request in requests:
                for notify in callbacks:
                    notify(request, now)
        for request, allocation in draft.reserved:
            for notify_of in policies.on_reserved:
                notify_of(request, allocation, now)

    def _with_candidates(self, context: StepContext) -> StepContext:
        found = find_candidates(
            self._policies, self._kv, self._placer, self._evictor.holders, context, led_since=self._draft.led_since
        )
        tiers = self._kv.tiers
        if tiers is None or not tiers.cpu_total:  # no request has swapped-out blocks
            return context._replace(candidates=found)
        return context._replace(candidates=found, blocks_swapped_out=self._blocks_awaited)

    def _blocks_awaited(self, request: Request) -> int:
        held = self._kv.blocks_of(request)
        if held is None or not held.swapped_out or self._policies.eviction.returns_alongside(request):
            return 0
        return held.swapped_out

    def _new_placer(self) -> Placer:
        return Placer(self._policies, self._kv, self._context, self._draft, self._evictor)

    def _move_ahead(self, tiers: TierOperations) -> None:
        kv, context, ordering = self._kv, self._context, self._policies.ordering
        blocks_of = kv.blocks_of
        # Found only if the policy reads them: most do not.
        settled = LazySequence(
            request
            for request in kv.holders()
            if request.progress.finish_reason is None and (held := blocks_of(request)) is not None and held.is_settled
        )
        out, back = self._policies.eviction.ahead(settled, ordering, kv, context.now)
        if out or context.depth > 1 or tiers.cpu_free < tiers.cpu_total:
            ranked = ordering.ranked(context.now)
            self._placer.first = next((request for request in ranked if not request.is_satisfied), None)
        moves = self._draft.overlapped
        for request in out if context.may_leave else ():
            if request is self._placer.first:
                continue  # the next to run could be swapped back and forth forever
            if request.progress.in_flight:
                self._draft.pausing.add(request)
            elif tiers.can_move_out(request, blocking=False):
                moves.append(self._evictor.swap_ahead(request))
        for request in back:
            if tiers.can_move_in(request):
                moves.append(tiers.move_in(request))
                request.progress.place()

    def _fill_from_first(self, builder: BatchBuilder) -> None:
        last = self._fill(self._policies.ordering.ranked(self._context.now), builder)
        # Skip the long queue: only holders can still run, and requests that the admission policy does not pass over.
        if last is not None and self._closed is None:
            last = self._fill(passing(self._policies, self._kv, self._holders_after(last)), builder)
        if last is not None:
            self._fill(self._holders_after(last), builder)

    def _holders_after(self, last: Request) -> list[Request]:
        holders = self._evictor.holders
        return holders.reserved_after(last) if self._is_selective and self._finds_holders else holders.after(last)

    def _fill(self, queue: Iterable[Request], builder: BatchBuilder) -> Request | None:
        """Offer the queue's requests to the batch, best first.

        Returns:
            The request at which the step closed to requests without KV or became selective, if there was one.
        """
        context, blocks_of, place = self._context, self._kv.blocks_of, self._placer.place
        offer, take, add = builder.offer, builder.take, self._draft.slices.append
        plan_id, latest = context.plan_id, context.latest
        new = tuple.__new__  # `Slice(...)` takes twice as long, and each step makes one for each request
        closed, is_selective, rest = self._closed, self._is_selective, iter(queue)
        for request in self._others(rest, builder):
            held = blocks_of(request)
            is_credited = held is None and request.prefix is not None and closed is None
            tokens = self._credit_prefix(request) if is_credited else eligible_tokens(request, context)
            if not tokens:
                self._pass_over(request)
            elif held is None and closed is not None:
                self._wait(request, closed)
            elif isinstance(verdict := offer(request, tokens), int):
                progress = request.progress
                start = progress.planned
                target = start + verdict
                if held is None or target > held.room:
                    placed = place(request, held, target)
                    held = None if isinstance(placed, Blocked) else placed
                    if isinstance(placed, Blocked) and self._block(request, placed).joins:
                        take(request, verdict)
                if held is not None:
                    take(request, verdict)
                    samples = verdict == tokens  # the slice ends at the last known or awaited token
                    add(new(Slice, (request, start, verdict, samples, target > progress.known, held.table)))
                    if progress.last_plan < latest:
                        self.started += 1
                        self._draft.events.append(Started(request, context.now))
                    progress.begin(target, samples, plan_id)
                    continue
            elif self._refuse(request, verdict) is Scope.ALL:
                if is_credited:
                    request.progress.rewind(0)
                return None
            if is_credited and blocks_of(request) is None:
                request.progress.rewind(0)
            if self._closed is not closed or self._is_selective is not is_selective:
                self.tail = self._closed or WaitReason.BEHIND_MEMORY
                return request
        return None

    def _others(self, queue: Iterator[Request], builder: BatchBuilder) -> Iterator[Request]:
        """Yield the requests about which the builder must be asked, and let the others decode."""
        if isinstance(builder, CountingBuilder) and builder.counts_decodes:
            return iter(partial(self._decode, queue, builder), None)
        return queue

    def _decode(self, queue: Iterator[Request], builder: CountingBuilder) -> Request | None:
        """Add requests of the queue that go on decoding without blocks of others, and return the first other one."""
        context, blocks_of, slices = self._context, self._kv.blocks_of, self._draft.slices
        plan_id, latest, overlap, pausing = context.plan_id, context.latest, context.overlap, context.pausing
        new, add, before, decoding = tuple.__new__, slices.append, len(slices), builder.decoding
        # After an eviction, some requests get no blocks.
        grow = self._kv.try_grow if not self._draft.evicted else _grows_not
        for request in islice(queue, builder.decodes):
            held, progress = blocks_of(request), request.progress
            start, samples = progress.planned, progress.pending_samples
            target = start + 1
            if (
                held is None
                or target != progress.known + samples
                or (samples and (not overlap or target >= request.max_total_tokens))
                or progress.awaits_grammar
                or progress.last_plan < latest
                or request in pausing
                or (decoding is not None and request not in decoding)
                or (target > held.room and not grow(request, target))
            ):
                other: Request | None = request
                break
            add(new(Slice, (request, start, 1, True, target > progress.known, held.table)))
            progress.begin(target, True, plan_id)
        else:
            other = next(queue, None)
        builder.take_decodes(len(slices) - before)
        return other

    def _credit_prefix(self, request: Request) -> int:
        """Credit prefix-cache hits; return the eligible tokens, 0 if it waits for a prefix."""
        hit = self._kv.hit(request)
        if not self._is_forced and comes_soon(
            request, hit, self._context, self._policies.ordering, self._draft.led_since
        ):
            self._wait(request, WaitReason.BEHIND_PREFIX)
            return 0
        request.progress.rewind(hit.tokens)
        return eligible_tokens(request, self._context)

    def _refuse(self, request: Request, refusal: Refusal) -> Scope:
        self._wait(request, refusal.reason)
        if refusal.scope is Scope.ALL:
            self.tail = refusal.reason
        elif refusal.scope is Scope.INCOMING:
            self._closed = self._closed or refusal.reason
        return refusal.scope

    def _block(self, request: Request, blocked: Blocked) -> Blocked:
        self._wait(request, blocked.reason, blocked.short)
        if blocked.is_deferred:
            self._draft.deferred.append(request)
        if blocked.closes is Deferral.INCOMING:
            self._closed = self._closed or WaitReason.BEHIND_MEMORY
        elif blocked.closes is Deferral.REQUEST:
            self._is_selective = True
        return blocked

    def _restart(self) -> None:
        """Restart an empty batch without candidates, which found no space."""
        first, self._placer = self._placer.first, self._new_placer()
        self._placer.first = first
        self._closed, self._is_selective = None, False
        self._draft.waiting_for_kv.clear()
        self._draft.pausing.clear()  # no plan in flight delays their eviction
        builder = self._policies.batcher.open(self._context)
        self._fill_from_first(builder)
        if not (self._draft.slices or self._draft.blocking):
            self._force(builder)
        for slice_ in self._draft.slices:
            self.waits.pop(slice_.request, None)  # the first attempt let it wait

    def _force(self, builder: BatchBuilder) -> None:
        """Run the first request that the batcher accepts, whatever the other policies decide.

        Every other one can be evicted, except where another engine uses blocks.
        """
        self._is_forced = True
        if (reservations := self._kv.reservations) is not None:
            reservations.empty_accounts()
        for request in self._policies.ordering.ranked(self._context.now):
            self._closed = None
            self._placer.force()
            self._fill((request,), builder)
            if self._draft.slices:
                return

    # -- waiting ------------------------------------------------------------------------------------------

    def _pass_over(self, request: Request) -> None:
        progress = request.progress
        if not (progress.in_flight or request.is_satisfied or request in self.waits):
            self._wait(request, WaitReason.GRAMMAR if progress.awaits_grammar else WaitReason.HELD_BY_EVICTION)

    def _wait(self, request: Request, reason: WaitReason, short: int = 0) -> None:
        if request.progress.in_flight:
            return
        wait = self.waits.get(request) or self._before.get(request)
        if wait is None or wait.reason is not reason:
            wait = WaitState(reason, self._context.now, short)
            self._draft.events.append(Waited(request, self._context.now, reason, short))
        self.waits[request] = wait
