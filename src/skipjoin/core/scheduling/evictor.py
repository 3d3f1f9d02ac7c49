"""Which requests give up their device blocks in a step, so that a request that matters more can have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skipjoin.core.events import Event, Preempted, Preemption
from skipjoin.core.kv.interface import Ledger
from skipjoin.core.kv.reservations import Lender
from skipjoin.core.policy import Eviction, Policies
from skipjoin.core.request import NEVER, Request
from skipjoin.core.scheduling.context import StepContext
from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.core.step import Move


class Evictor:
    """Makes room on the device in one step.

    blocking: the step's blocking moves, to which it adds those out. evicted: the requests that lost device blocks; the
    ordering must hear of them when it is not iterated over any more. takes_all: whether victims give up all their
    blocks, whatever the policy asks of them.
    """

    def __init__(self, policies: Policies, kv: Ledger, events: list[Event], context: StepContext) -> None:
        self.blocking: list[Move] = []
        self.evicted: list[Request] = []
        self.takes_all = False
        self._policies = policies
        self._rank = policies.ordering.rank
        self._kv = kv
        self._events = events
        self._context = context
        self._leaving: dict[Request, Move | None] = {}  # of whose KV `blocking` moves a part out
        self._floor: Any = None  # best rank of an evicted request: none ranked below it takes new space
        self._holders: list[Request] | None = None  # best first; sorted when first needed

    def is_below_floor(self, request: Request) -> bool:
        """Whether a request that matters at least as much was evicted in this step, the request itself included."""
        return self._floor is not None and self._rank(request) >= self._floor

    def holders_after(self, last: Request) -> list[Request]:
        """The requests ranked below `last` that hold KV and that this step may run, best first."""
        floor, rank = self._rank(last), self._rank
        return [request for request in self._holders_ranked() if rank(request) > floor]

    def best_effort_below(self, request: Request) -> list[Request]:
        """The best-effort requests that this one may evict at once to get in: first those that wait for KV on the host
        anyway, then the least important."""
        lenders = self._kv.lenders(request, None)
        below = self._evictable(request, lenders, newcomer=True)
        able = [victim for victim in below if victim.is_best_effort and not victim.in_flight]
        return sorted(able, key=lambda victim: not self._kv.footprint_on_host(victim))

    def make_room(
        self, request: Request, missing: Callable[[], int], *, tokens: int, lender: Lender, newcomer: bool
    ) -> WaitReason | None:
        """Evict until nothing is missing, or evict nothing and return why the request waits.

        Args:
            request: The request that needs blocks.
            missing: Returns how many blocks are short now; positive when this method is called.
            tokens: How many tokens the request is to hold.
            lender: What lends the request its claim.
            newcomer: Whether some of the request's KV is not on the device; otherwise the request runs and grows.
        """
        if self.takes_all:
            return self._force_room(request, missing, tokens)
        short = missing()
        footprint, eviction = self._kv.footprint, self._policies.eviction
        lenders = self._kv.lenders(request, lender)
        candidates = self._evictable(request, lenders, newcomer=newcomer)
        settled = [victim for victim in candidates if not victim.in_flight]
        comes = request if newcomer else None
        now = self._context.now
        if sum(map(footprint, settled)) >= short:
            evictions = eviction.victims(short, settled, self._kv, now, comes)
            borrower = request if lender is None else None
            dropped = sum(self._evict(one) for one in evictions if not self._lend(one, borrower))
            if newcomer and dropped:
                eviction.dropped(dropped, now)
            return None if evictions else WaitReason.HELD_BY_EVICTION
        if self._freed_by_all(settled, request, tokens) >= short:
            return self._clear(settled, missing, comes)
        # Plans in flight hold some of them. A request that runs in every plan could never be evicted: it pauses.
        if sum(map(footprint, candidates)) >= short:
            evictions = eviction.victims(short, candidates, self._kv, now, comes)
            self._context.pausing.update(one.request for one in evictions)
        elif self._freed_by_all(candidates, request, tokens) >= short:
            self._context.pausing.update(candidates)
        return WaitReason.NO_KV

    def refusal(self, request: Request, short: int, *, lender: Lender) -> WaitReason | None:
        """Return why evictions cannot give `short` blocks to a request without KV, or None if they may."""
        candidates = self._evictable(request, self._kv.lenders(request, lender), newcomer=True)
        if sum(map(self._kv.footprint, candidates)) + self._kv.shared_within(candidates) < short:
            return WaitReason.NO_KV
        settled = [victim for victim in candidates if not victim.in_flight]
        if sum(map(self._kv.footprint, settled)) < short:
            return None
        evictions = self._policies.eviction.victims(short, settled, self._kv, self._context.now, request)
        return None if evictions else WaitReason.HELD_BY_EVICTION

    def _freed_by_all(self, victims: Sequence[Request], request: Request, tokens: int) -> int:
        """Return how many blocks the request gains for `tokens` tokens if none of the victims holds anything."""
        kv = self._kv
        return sum(map(kv.footprint, victims)) + kv.shared_within(victims) + kv.relief(request, tokens, victims)

    def _clear(self, victims: list[Request], missing: Callable[[], int], comes: Request | None) -> WaitReason | None:
        """Evict whole victims until nothing is missing: shared blocks come free with the last request that holds
        them."""
        kv, eviction = self._kv, self._policies.eviction
        while victims and (short := missing()) > 0:
            most = max(1, min(short, sum(map(kv.footprint, victims))))
            evictions = eviction.victims(most, victims, kv, self._context.now, comes)
            if not evictions:
                return WaitReason.HELD_BY_EVICTION
            for one in evictions:
                self._evict(one._replace(blocks=None))  # a part of what is shared would free nothing
                victims.remove(one.request)
            comes = None  # once begun, it goes on: the first victims would have been evicted for nothing
        return None if missing() <= 0 else WaitReason.NO_KV

    def _force_room(self, request: Request, missing: Callable[[], int], tokens: int) -> WaitReason | None:
        """Evict any other requests until nothing is missing."""
        kv, victims = self._kv, self._others(request)
        held = ((one, kv.blocks_of(one)) for one in kv.holders())
        if any(one.finish_reason is not None or (blocks is not None and blocks.moving) for one, blocks in held):
            # Another engine still reads or writes KV here. It may be the blocks of that which are missing, so no
            # request is evicted in vain, nor one that ranks higher.
            own = self._rank(request)
            victims = [victim for victim in victims if self._rank(victim) > own]
            if self._freed_by_all(victims, request, tokens) < missing():
                return WaitReason.NO_KV
        return self._clear(victims, missing, None)

    def _others(self, request: Request) -> list[Request]:
        """Return all other requests that hold device blocks, the least important first."""
        blocks_of = self._kv.blocks_of
        found = reversed(self._holders_ranked())
        return [one for one in found if one is not request and (held := blocks_of(one)) is not None and held.device]

    def force(self) -> None:
        """Let any other request make room from now on, whatever its rank, and give up all that it holds."""
        self.takes_all, self._floor = True, None

    def hindered(self, request: Request, tokens: int) -> WaitReason | None:
        """Return the wait reason if a co-owner of a block whose slots the request needs runs, or keeps its KV for
        another engine, else None."""
        owners = [
            owner
            for owner in self._kv.in_the_way(request, tokens)
            if owner.in_flight or owner.last_plan == self._context.plan_id or owner.finish_reason is not None
        ]
        self._context.pausing.update(owners)
        return WaitReason.NO_KV if owners else None

    def take_slots(self, request: Request, tokens: int) -> None:
        """Save what others have in the slots that the request is to fill. None of them may run: ask `hindered`."""
        kv = self._kv
        whole = {owner for owner in kv.in_the_way(request, tokens) if not kv.footprint_on_host(owner)}
        self.blocking += kv.take_slots(request, tokens)
        for owner in sorted(whole, key=self._rank):
            self._note(owner, Preemption.SPILL, kv.tokens_there(owner))
            owner.is_fresh = True

    def swap_ahead(self, request: Request) -> Move:
        """Begin an overlapped move of the request's KV to the host."""
        move = self._kv.move_out(request, blocking=False)
        assert move is not None
        self.evicted.append(request)
        request.last_plan = NEVER
        self._events.append(Preempted(request, self._context.now, Preemption.SWAP))
        return move

    def _holders_ranked(self) -> list[Request]:
        """The holders of KV that this step may still run or evict, best first.

        Requests that the step runs already rank above every request that is looked at from now on.
        """
        if self._holders is None:
            blocks_of, returns_overlapped = self._kv.blocks_of, self._policies.eviction.returns_overlapped
            plan_id = self._context.plan_id
            able = []
            for request in self._kv.holders():
                if request.last_plan == plan_id or request.finish_reason is not None:
                    continue
                held = blocks_of(request)
                if held is None or held.moving is not None:
                    continue
                if held.device or not returns_overlapped(request):
                    able.append(request)
            self._holders = sorted(able, key=self._rank)
        return self._holders

    def _evictable(self, request: Request, lenders: frozenset[Lender], *, newcomer: bool) -> list[Request]:
        """Requests that may be evicted for this one, least important first, once no plan in flight holds them. What one
        gives back must go to one of the lenders.

        A request that runs has generated a token since it got its KV before it makes way for a newcomer: so every
        eviction of one that runs is paid for by progress, and two requests cannot evict each other in turn for nothing.
        """
        outranks, latest = self._policies.ordering.outranks, self._context.latest
        own = self._rank(request)
        found: list[Request] = []
        for victim in reversed(self._holders_ranked()):
            if self._rank(victim) <= own:
                break
            held = self._kv.blocks_of(victim)
            if held is None or not held.device or (held.moving is not None and victim not in self._leaving):
                continue
            if not self._kv.gives_back_to(victim, lenders):
                continue
            if newcomer:
                if not outranks(request, victim):
                    break
                if victim.is_fresh and victim.last_plan >= latest:
                    continue
            found.append(victim)
        return found

    def _lend(self, eviction: Eviction, borrower: Request | None) -> bool:
        """Let the request have blocks of the victim to fill from the other end, if that is what is to become of them.
        The victim loses nothing yet."""
        victim, kv = eviction.request, self._kv
        if not eviction.lent or self.takes_all or borrower is None:
            return False
        if not kv.can_lend(victim, borrower):
            return False
        keep = 0 if eviction.blocks is None else kv.filled_after(victim, eviction.blocks)
        kv.trim(victim)
        return kv.lend(victim, keep, borrower)

    def _note(self, victim: Request, how: Preemption, kept: int) -> None:
        """KV of the victim left the device."""
        rank = self._rank(victim)
        if self._floor is None or rank < self._floor:
            self._floor = rank
        self.evicted.append(victim)
        victim.evictions += 1
        victim.last_plan = NEVER
        self._events.append(Preempted(victim, self._context.now, how, kept))

    def _evict(self, eviction: Eviction) -> int:
        """Take KV of the victim off the device before the slices run; of how many tokens it is dropped."""
        victim, kv = eviction.request, self._kv
        computed = victim.computed
        keep = 0 if eviction.blocks is None or self.takes_all else kv.filled_after(victim, eviction.blocks)
        kept = kv.tokens_in(victim, keep)
        how = self._take(victim, eviction.how, keep)
        if how is Preemption.DROP:
            victim.computed = victim.planned = kept
        victim.is_fresh = victim.is_fresh or keep > 0  # what it keeps does not come to the device again
        self._note(victim, how, kept)
        return computed - victim.computed

    def _take(self, victim: Request, how: Preemption, keep: int) -> Preemption:
        """Take all but the first `keep` blocks with KV from the victim; returns what becomes of what they held."""
        kv = self._kv
        if keep and keep == kv.filled(victim):  # blocks without KV are enough
            kv.trim(victim)
            self._context.pausing.add(victim)
            return Preemption.SPILL
        if (begun := self._leaving.pop(victim, None)) is not None:
            self.blocking.remove(begun)
            kv.recall(begun)
        if how is Preemption.DROP or not kv.can_move_out(victim, keep=keep):
            kv.drop(victim, keep=keep)
            return Preemption.DROP
        move = kv.move_out(victim, blocking=True, keep=keep, before=begun)
        if move is not None:
            self.blocking.append(move)
        if not keep:
            return Preemption.SWAP
        self._leaving[victim] = move
        return Preemption.SPILL
