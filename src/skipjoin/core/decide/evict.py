from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from skipjoin.core.context import StepContext
from skipjoin.core.decide.draft import Draft
from skipjoin.core.decide.holders import RankedHolders, blocks_swapped_out, is_protected
from skipjoin.core.decide.lazy import LazySequence
from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.kv.operations import BlockLedger
from skipjoin.core.kv.reservations import Owner
from skipjoin.core.policy import Eviction
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.core.step import Move
from skipjoin.core.waits import WaitReason


class Need(NamedTuple):
    """Device blocks that a request needs.

    Attributes:
        missing: Returns how many blocks are missing now, which depends on evictions.
        parent: Parent of the reservation; only blocks that return to it help.
        grows: Whether all requests ranked after this one may be evicted at once. Otherwise only those that it outranks,
            each with at least one token since it got its KV.
        drawn: Blocks of the account that the allocation draws, which need no eviction.
    """

    request: Request
    tokens: int
    missing: Callable[[], int]
    parent: Owner
    grows: bool
    drawn: int = 0

    def short(self) -> int:
        return self.missing() - self.drawn


class Choice(NamedTuple):
    """What to evict for a request."""

    reason: WaitReason | None = None  # why it waits; None if the evictions suffice
    evictions: Sequence[Eviction] = ()
    whole: Sequence[Request] | None = None  # to evict whole, worst first, because they share blocks
    pausing: Iterable[Request] | None = None  # must pause, because plans in flight contain them
    is_stuck: bool = False  # all that may be evicted would not suffice


class Evictor:
    def __init__(self, policies: Policies, kv: BlockLedger, context: StepContext, draft: Draft) -> None:
        self._is_forced = False
        self._policies = policies
        self._rank = policies.ordering.rank
        self._kv = kv
        self._tiers, self._sharing, self._reservations = kv.tiers, kv.sharing, kv.reservations
        self._context = context
        self._draft = draft
        self._leaving: dict[Request, Move | None] = {}  # requests with partial swap-outs in `Draft.blocking`
        self._floor: Any = None  # best rank of an evicted request; none ranked after it gets new blocks
        self.holders = RankedHolders(policies, kv, context, draft, self._leaving)

    def barred(self, request: Request) -> WaitReason | None:
        """Return why the request gets no blocks after the evictions of this step, if so."""
        if self._floor is None or (rank := self._rank(request)) < self._floor:
            return None
        return WaitReason.NO_KV if rank == self._floor else WaitReason.BEHIND_MEMORY

    def choose(self, need: Need, short: int) -> Choice:
        """Choose what to evict for `short` blocks among the requests ranked below. Pure."""
        if self._is_forced:
            return self._choose_of_all(need, short)
        # Both are found as far as they are read, which must be before any eviction.
        candidates = LazySequence(self.holders.evictable(need.request, need.parent, grows=need.grows))
        settled = LazySequence(victim for victim in candidates if not victim.progress.in_flight)
        victims = partial(self._policies.eviction.victims, short, kv=self._kv, now=self._context.now)
        arriving = None if need.grows else need.request
        if self._suffice(settled, short):
            evictions = victims(settled, incoming=arriving)
            return Choice(None if evictions else WaitReason.NO_KV, evictions)
        if self._freed_by_all(settled, need) >= short:
            return Choice(whole=settled)
        # Plans in flight contain some victims. They pause, because a request in every plan could never be evicted.
        if self._suffice(candidates, short):
            pausing = [eviction.request for eviction in victims(candidates, incoming=arriving)]
            return Choice(WaitReason.NO_KV, pausing=pausing)
        if self._freed_by_all(candidates, need) >= short:
            return Choice(WaitReason.NO_KV, pausing=candidates)
        return Choice(WaitReason.NO_KV, is_stuck=True)

    def make_room(self, need: Need, short: int) -> Choice:
        """Evict what `choose` returns; its reason is set if that was not enough."""
        choice = self.choose(need, short)
        self._draft.pausing.update(choice.pausing or ())
        if choice.whole is not None:
            return choice._replace(reason=self._evict_whole(list(choice.whole), need))
        borrower = need.request if need.parent is None else None
        dropped = sum(self._evict(eviction) for eviction in choice.evictions if not self._share(eviction, borrower))
        if dropped and not need.grows:
            self._policies.eviction.on_dropped(dropped, self._context.now)
        return choice

    def free_state(self, request: Request) -> bool:
        """Give the request a slot for its state, if it needs one, by evicting the last request that may be.

        Returns:
            False if it must wait.
        """
        kv, rank, latest, states = self._kv, self._rank, self._context.latest, self._kv.states
        if states is None or states.free or states.slot_of(request) is not None:
            return True
        own, outranks = rank(request), self._policies.ordering.outranks
        below = []
        for victim in kv.holders():
            held, progress = kv.blocks_of(victim), victim.progress
            if held is None or not held.is_settled or progress.finish_reason is not None:
                continue
            if states.slot_of(victim) is None:
                continue
            has_begun = progress.last_plan == self._context.plan_id
            is_below = own < rank(victim) and outranks(request, victim) and not is_protected(victim, request, latest)
            if not has_begun and (self._is_forced or is_below):
                below.append(victim)
        if not below:
            return False
        victim = max(below, key=rank)
        if victim.progress.in_flight:  # it pauses, and is evicted in a later step
            self._draft.pausing.add(victim)
            return False
        chosen: Sequence[Eviction] = ()
        if blocks := kv.footprint(victim):
            chosen = self._policies.eviction.victims(blocks, [victim], kv, self._context.now, request)
        how = chosen[0].how if chosen else Preemption.DROP
        self._evict(Eviction(victim, how))
        return True

    def _suffice(self, victims: Sequence[Request], short: int) -> bool:
        footprint = self._kv.footprint
        for victim in victims:
            if short <= 0:
                return True
            short -= footprint(victim)
        return short <= 0

    def _freed_by_all(self, victims: Sequence[Request], need: Need) -> int:
        freed, cache, sharing = sum(map(self._kv.footprint, victims)), self._kv.cache, self._sharing
        freed += cache.shared_within(victims) if cache is not None else 0
        return freed + (sharing.saved_blocks(need.request, need.tokens, victims) if sharing is not None else 0)

    def _evict_whole(self, victims: list[Request], need: Need) -> WaitReason | None:
        kv, eviction, arriving = self._kv, self._policies.eviction, None if need.grows else need.request
        while victims and (short := need.short()) > 0:
            most = max(1, min(short, sum(map(kv.footprint, victims))))
            evictions = eviction.victims(most, victims, kv, self._context.now, arriving)
            if not evictions:
                return WaitReason.NO_KV
            for evicted in evictions:
                self._evict(evicted._replace(blocks=None))  # a part of the shared blocks would free nothing
                victims.remove(evicted.request)
            arriving = None  # a refusal now would waste the first evictions
        return None if need.short() <= 0 else WaitReason.NO_KV

    def _choose_of_all(self, need: Need, short: int) -> Choice:
        kv, victims = self._kv, self.holders.others(need.request)
        held = ((holder, kv.blocks_of(holder)) for holder in kv.holders())
        if any(
            holder.progress.finish_reason is not None or (blocks is not None and blocks.moving)
            for holder, blocks in held
        ):
            # Another engine still uses blocks here, and these may be the missing ones. Evict only lower-ranked
            # requests, and only if that suffices.
            own = self._rank(need.request)
            victims = [victim for victim in victims if self._rank(victim) > own]
            if self._freed_by_all(victims, need) < short:
                return Choice(WaitReason.NO_KV)
        return Choice(whole=victims)

    def force(self) -> None:
        """From now on, evict any other request whole, regardless of rank."""
        self._is_forced, self._floor = True, None

    def is_hindered(self, request: Request, tokens: int) -> bool:
        """Return whether a co-owner of a needed shared block runs, and then pauses, or is read by another engine."""
        if self._sharing is None:
            return False
        owners = [
            owner
            for owner in self._sharing.in_the_way(request, tokens)
            if owner.progress.in_flight
            or owner.progress.last_plan == self._context.plan_id
            or owner.progress.finish_reason is not None
        ]
        self._draft.pausing.update(owners)
        return bool(owners)

    def take_slots(self, request: Request, tokens: int) -> None:
        """Save the KV in shared slots that the request overwrites. Check `is_hindered` first."""
        if (sharing := self._sharing) is None:
            return
        whole = {owner for owner in sharing.in_the_way(request, tokens) if not blocks_swapped_out(self._kv, owner)}
        self._draft.blocking += sharing.take_slots(request, tokens)
        for owner in sorted(whole, key=self._rank):
            self._note(owner, Preemption.SPILL, sharing.tokens_there(owner))
            owner.progress.place()

    def swap_ahead(self, request: Request) -> Move:
        assert self._tiers is not None
        move = self._tiers.move_out(request, blocking=False)
        assert move is not None
        self._draft.evicted.append(request)
        request.progress.pause()
        self._draft.events.append(Preempted(request, self._context.now, Preemption.SWAP))
        return move

    def _share(self, eviction: Eviction, borrower: Request | None) -> bool:
        victim, kv, sharing = eviction.request, self._kv, self._sharing
        if not eviction.shared or self._is_forced or borrower is None or sharing is None:
            return False
        if not sharing.can_share(victim, borrower):
            return False
        keep = 0 if eviction.blocks is None else kv.filled_after(victim, eviction.blocks)
        kv.trim(victim)
        return sharing.share(victim, keep, borrower)

    def _note(self, victim: Request, how: Preemption, kept: int) -> None:
        rank = self._rank(victim)
        if self._floor is None or rank < self._floor:
            self._floor = rank
        self._draft.evicted.append(victim)
        victim.progress.evict()
        self._draft.events.append(Preempted(victim, self._context.now, how, kept))

    def _evict(self, eviction: Eviction) -> int:
        """Evict one request, and return how many tokens it is expected to compute again."""
        victim, kv = eviction.request, self._kv
        keep = 0 if eviction.blocks is None or self._is_forced else kv.filled_after(victim, eviction.blocks)
        kept = kv.tokens_in(victim, keep)
        displaced = self._displace(victim) if eviction.displaces and not keep else 0
        lost = kv.lost(victim, keep)
        how = self._take(victim, eviction.how, keep)
        if how is Preemption.DROP:
            victim.progress.rewind(kept)
        elif keep:  # the kept part is not swapped in again
            victim.progress.place()
        self._note(victim, how, kept)
        return displaced + (lost if how is Preemption.DROP else 0)

    def _displace(self, victim: Request) -> int:
        """Drop the KV of requests ranked after the victim, last ones first, to make room on the CPU tier.

        Returns:
            The number of lost tokens; 0 if nothing was dropped because it would not suffice.
        """
        kv, tiers, rank = self._kv, self._tiers, self._rank
        short = kv.filled(victim) - tiers.cpu_free if tiers is not None else 0
        if short <= 0:
            return 0
        own, chosen = rank(victim), list[Request]()
        after = [
            (theirs, holder) for holder in kv.holders() if self._is_parked(holder) and (theirs := rank(holder)) > own
        ]
        for _, holder in sorted(after, key=itemgetter(0), reverse=True):
            chosen.append(holder)
            held = kv.blocks_of(holder)
            short -= len(held.cpu) if held is not None else 0
            if short <= 0:
                break
        else:
            return 0
        tokens = sum(map(kv.lost, chosen))
        for holder in chosen:
            kv.drop(holder)
            holder.progress.rewind(0)
            self._note(holder, Preemption.DROP, 0)
        return tokens

    def _is_parked(self, request: Request) -> bool:
        held = self._kv.blocks_of(request)
        is_swapped_out = held is not None and held.is_settled and bool(held.cpu) and not held.device
        return is_swapped_out and request.progress.finish_reason is None

    def _take(self, victim: Request, how: Preemption, keep: int) -> Preemption:
        kv, tiers = self._kv, self._tiers
        if keep and keep == kv.filled(victim):  # freeing blocks without KV is enough
            kv.trim(victim)
            self._draft.pausing.add(victim)
            return Preemption.SPILL
        if (begun := self._leaving.pop(victim, None)) is not None and tiers is not None:
            self._draft.blocking.remove(begun)
            tiers.recall(begun)
        if how is Preemption.DROP or tiers is None or not tiers.can_move_out(victim, keep=keep):
            kv.drop(victim, keep=keep)
            return Preemption.DROP
        move = tiers.move_out(victim, blocking=True, keep=keep, before=begun)
        if move is not None:
            self._draft.blocking.append(move)
        if not keep:
            return Preemption.SWAP
        self._leaving[victim] = move
        return Preemption.SPILL
