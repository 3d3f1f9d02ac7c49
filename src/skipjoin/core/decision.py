"""How one step is decided: the moves beside it, the batch, and who makes way for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skipjoin.core.events import Admitted, Event, Preempted, Preemption, Started
from skipjoin.core.kv import KVLedger, RequestBlocks
from skipjoin.core.policy import Outlook, Policies, Refusal, Wait
from skipjoin.core.request import NEVER, Request
from skipjoin.core.step import Move, Slice, StepPlan


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision depends on besides requests and KV.

    now: seconds on the driver's clock. plan_id: of the plan that it becomes. latest: a request whose last slice was in
    this plan or a later one runs. depth, overlap: the scheduler's. may_leave: whether KV may leave beside the step.
    in_flight: the plans that have not committed, oldest first.
    """

    now: float
    plan_id: int
    latest: int
    depth: int
    overlap: bool
    may_leave: bool
    in_flight: Sequence[StepPlan]


class Decision:
    """One step while it is being decided: what moves beside it, who runs, and what moves before it for that.

    To be asked in this order, once each: `move_ahead`, `fill`, `tell_ordering`.
    """

    def __init__(self, policies: Policies, kv: KVLedger, events: list[Event], situation: Situation) -> None:
        self.blocking: list[Move] = []
        self.waiting_for_kv: list[Request] = []  # who would run if its KV were on the device
        self._taken = 0  # device blocks of those who run
        self._at = situation
        self._kv = kv
        self._policies = policies
        self._ordering = policies.ordering
        self._events = events
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
        still = [request for request in kv.holders() if request.finish_reason is None and kv.is_settled(request)]
        eviction = self._policies.eviction
        out, back = eviction.ahead(still, self._ordering, kv, self._at.now)
        if out or eviction.returns_overlapped or self._at.depth > 1:
            self._first = next((one for one in self._ordering.ranked(self._at.now) if not one.is_satisfied), None)
        moves: list[Move] = []
        for request in out if self._at.may_leave else ():
            if request is self._first:
                continue  # its turn has come: it could be moved back and forth and never run
            if request.in_flight:
                self._yielding.add(request)
            elif kv.can_move_out(request):
                moves.append(kv.move_out(request, blocking=False))
                self._evicted.append(request)
                request.last_plan = NEVER
                self._events.append(Preempted(request, self._at.now, Preemption.SWAP))
        for request in back:
            if kv.can_move_in(request):
                moves.append(kv.move_in(request))
                request.is_fresh = True
        return moves

    def fill(self) -> list[Slice]:
        """Choose the batch, best requests first."""
        slices: list[Slice] = []
        at, kv = self._at, self._kv
        plan_id, latest = at.plan_id, at.latest
        overlap, yielding = at.overlap, self._yielding
        packing = self._policies.batcher.open(at.now, Outlook(at.in_flight, self._could_run()))
        offer, take, blocks_of = packing.offer, packing.take, kv.blocks_of
        for request in self._candidates():
            planned = request.planned
            known = request.known
            end = known + request.pending_samples
            # Nothing to do: all it may generate is on its way, or a token that must be known first.
            if end >= request.max_total_tokens or (request.pending_samples and not overlap):
                continue
            held = blocks_of(request)
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
                    self._first_waits = self._first_waits or (request is self._first and at.depth > 1)
                    continue
            take(request, verdict)
            self._taken += len(held.table)
            samples = target == end
            slices.append(Slice(request, planned, verdict, samples, target > known, held.table))
            request.planned = target
            if samples:
                request.pending_samples += 1
            if request.last_plan < latest:
                self._events.append(Started(request, self._at.now))
            request.last_plan = plan_id
        return slices

    def _candidates(self) -> Iterator[Request]:
        """All requests best first; from the moment the step is closed to newcomers, only the holders of KV, so
        that a long queue behind a full device costs nothing."""
        last = None
        for request in self._ordering.ranked(self._at.now):
            yield request
            if self._closed:
                last = request
                break
        if last is not None:
            yield from self._holders_after(last)

    def _holders_after(self, last: Request) -> Iterator[Request]:
        rank = self._ordering.rank
        floor = rank(last)
        return (request for request in self._holders_ranked() if rank(request) > floor)

    def _could_run(self) -> Iterator[tuple[Request, int]]:
        """See `Outlook.idle`."""
        kv, admission, overlap, yielding = self._kv, self._policies.admission, self._at.overlap, self._yielding
        room, passes_over, blocks_of = kv.available, self._policies.eviction.returns_overlapped, kv.blocks_of
        for request in self._ordering.ranked(self._at.now):
            end = request.known + request.pending_samples
            if end >= request.max_total_tokens or (request.pending_samples and not overlap) or request in yielding:
                continue
            held = blocks_of(request)
            if held is None:
                promise = admission.admit(request, kv)
                if isinstance(promise, Wait) or (need := max(promise.now, promise.blocks)) + promise.spare > room:
                    break
                room -= need
            elif held.moving is not None or (held.host and (passes_over or len(held.host) > room)):
                continue
            else:
                room -= len(held.host)
            yield request, end - request.planned
        else:
            return
        for holder in self._holders_after(request):
            held, end = blocks_of(holder), holder.known + holder.pending_samples
            can_run = (
                end < holder.max_total_tokens and (overlap or not holder.pending_samples) and holder not in yielding
            )
            if can_run and held is not None and held.device:
                yield holder, end - holder.planned

    def _holders_ranked(self) -> list[Request]:
        """The holders that this step may run or evict, best first."""
        if self._holders is None:
            blocks_of, passes_over = self._kv.blocks_of, self._policies.eviction.returns_overlapped
            able = []
            for request in self._kv.holders():
                held = blocks_of(request)
                if held is None or held.moving is not None or request.finish_reason is not None:
                    continue
                if held.device or not passes_over:
                    able.append(request)
            self._holders = sorted(able, key=self._ordering.rank)
        return self._holders

    # -- making room --------------------------------------------------------------------------------------

    def _secure(self, request: Request, held: RequestBlocks | None, target: int) -> RequestBlocks | None:
        """Device space for `target` tokens of the request, or None if it must wait."""
        if held is None:
            if self._is_below_floor(request) or (held := self._admit(request, target)) is None:
                self._closed = True
            return held
        if held.moving is not None:
            self._miss(request, len(held.host))
            return None
        # Who matters most does not wait for moves beside steps: the space that they need may never be left over.
        if held.host and self._policies.eviction.returns_overlapped and request is not self._first:
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
            self.waiting_for_kv.append(request)
        else:
            # Those who matter more than everybody from here on fill the device.
            self._closed = True

    def _admit(self, request: Request, target: int) -> RequestBlocks | None:
        """First blocks for a request that holds none."""
        promise = self._policies.admission.admit(request, self._kv)
        if isinstance(promise, Wait):
            return None
        need = max(promise.now, promise.blocks, self._kv.blocks_for(target)) + promise.spare
        # Who matters more and is on its way back from the host comes first to what is free.
        if not self._make_room(request, need - max(0, self._kv.available - self._owed), newcomer=True):
            return None
        self._kv.promise(request, promise.blocks)
        self._events.append(Admitted(request, self._at.now))
        request.is_fresh = True
        return self._kv.grow(request, target)

    def _return(self, request: Request, blocks: int, target: int) -> RequestBlocks | None:
        """Bring the request's KV back from the host, before the slices run."""
        need = max(blocks, self._kv.blocks_for(target))
        if not self._make_room(request, need - self._kv.available, newcomer=True):
            return None
        self.blocking.append(self._kv.move_in(request))
        request.is_fresh = True
        return self._kv.grow(request, target)

    def _is_below_floor(self, request: Request) -> bool:
        """Whether somebody who matters at least as much was evicted in this step, the request itself included."""
        return self._floor is not None and self._ordering.rank(request) >= self._floor

    def _make_room(self, request: Request, short: int, *, newcomer: bool) -> bool:
        """Evict until `short` more blocks are available; evicts nobody unless that succeeds."""
        if short <= 0:
            return True
        footprint, eviction = self._kv.footprint, self._policies.eviction
        candidates = self._evictable(request, newcomer=newcomer)
        still = [victim for victim in candidates if not victim.in_flight]
        comes = request if newcomer else None
        if sum(map(footprint, still)) >= short:
            victims = eviction.victims(short, still, self._kv, self._at.now, comes)
            dropped = sum(self._evict(victim, how) for victim, how in victims)
            if newcomer and dropped:
                eviction.dropped(dropped, self._at.now)
            return bool(victims)
        if sum(map(footprint, candidates)) >= short:
            # Plans in flight hold some of them. Whoever runs in every plan could never be evicted, so they pause.
            victims = eviction.victims(short, candidates, self._kv, self._at.now, comes)
            self._yielding.update(victim for victim, _ in victims)
        return False

    def _evictable(self, request: Request, *, newcomer: bool) -> list[Request]:
        """Who may be evicted for the request, least important first, once no plan in flight holds them.

        Who runs has generated a token since it got its KV before it makes way for a newcomer: so every eviction of
        one that runs is paid for by progress, and requests cannot throw each other out in turn for nothing.
        """
        ordering, latest = self._ordering, self._at.latest
        own = ordering.rank(request)
        found: list[Request] = []
        for victim in reversed(self._holders_ranked()):
            if ordering.rank(victim) <= own:
                break
            held = self._kv.blocks_of(victim)
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
            self.blocking.append(self._kv.move_out(victim, blocking=True))
        else:
            how, dropped = Preemption.DROP, victim.computed
            self._kv.release(victim)
            victim.computed = victim.planned = 0
        victim.evictions += 1
        victim.last_plan = NEVER
        self._events.append(Preempted(victim, self._at.now, how))
        return dropped

    def tell_ordering(self) -> None:
        """Tell the ordering who was evicted, now that nobody iterates over it any more."""
        for request in self._evicted:
            self._ordering.evicted(request, self._at.now)
