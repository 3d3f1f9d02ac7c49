from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from skipjoin.core.context import StepContext
from skipjoin.core.decide.draft import Draft
from skipjoin.core.decide.lazy import LazySequence
from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.kv.operations import BlockLedger
from skipjoin.core.kv.reservations import Owner
from skipjoin.core.policy import Eviction, Policies
from skipjoin.core.request import Band, Request
from skipjoin.core.step import Move
from skipjoin.core.waits import WaitReason

_BAND_OF: Callable[[Request], Band] = attrgetter("progress.band")


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
    """What to evict for a request.

    Attributes:
        reason: Why it waits; None if the evictions suffice.
        whole: Requests to evict whole, worst first, until nothing is missing, because they share blocks.
        pausing: Requests that must pause, because plans in flight contain them.
        is_stuck: Whether all that may be evicted would not suffice.
    """

    reason: WaitReason | None = None
    evictions: Sequence[Eviction] = ()
    whole: Sequence[Request] | None = None
    pausing: Iterable[Request] | None = None
    is_stuck: bool = False


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
        self._holders: list[tuple[Any, Request]] | None = None  # with ranks, best first; sorted on first use

    def barred(self, request: Request) -> WaitReason | None:
        """Return why the request gets no blocks after the evictions of this step, if so."""
        if self._floor is None or (rank := self._rank(request)) < self._floor:
            return None
        return WaitReason.NO_KV if rank == self._floor else WaitReason.BEHIND_MEMORY

    def holders_after(self, last: Request) -> list[Request]:
        """Return the holders ranked after `last` that this step may run, best first."""
        floor = self._rank(last)
        return [request for rank, request in self._holders_ranked() if rank > floor]

    def best_effort_below(self, request: Request) -> list[Request]:
        if not any(band[0] for band in {*map(_BAND_OF, self._kv.holders())}):
            return []  # ranking all holders takes longer
        below = self._evictable(request, None, grows=False)
        able = [victim for victim in below if victim.progress.band[0] and not victim.progress.in_flight]
        return sorted(able, key=lambda victim: not self.blocks_swapped_out(victim))

    def choose(self, need: Need, short: int) -> Choice:
        """Choose what to evict for `short` blocks among the requests ranked below. Pure."""
        if self._is_forced:
            return self._choose_of_all(need, short)
        # Both are found as far as they are read, which must be before any eviction.
        candidates = LazySequence(self._evictable(need.request, need.parent, grows=need.grows))
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
        """Evict what `choose` returns, and return it with the wait reason if that was not enough."""
        choice = self.choose(need, short)
        self._context.pausing.update(choice.pausing or ())
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
            is_below = own < rank(victim) and outranks(request, victim) and not _is_protected(victim, request, latest)
            if not has_begun and (self._is_forced or is_below):
                below.append(victim)
        if not below:
            return False
        victim = max(below, key=rank)
        if victim.progress.in_flight:  # it pauses, and is evicted in a later step
            self._context.pausing.add(victim)
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

    def blocks_swapped_out(self, request: Request) -> int:
        held = self._kv.blocks_of(request)
        return held.swapped_out if held is not None else 0

    def _evict_whole(self, victims: list[Request], need: Need) -> WaitReason | None:
        """Evict whole victims until nothing is missing."""
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
        kv, victims = self._kv, self._others(need.request)
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

    def _others(self, request: Request) -> list[Request]:
        blocks_of = self._kv.blocks_of
        found = (holder for _, holder in reversed(self._holders_ranked()))
        return [
            holder
            for holder in found
            if holder is not request and (held := blocks_of(holder)) is not None and held.device
        ]

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
        self._context.pausing.update(owners)
        return bool(owners)

    def take_slots(self, request: Request, tokens: int) -> None:
        """Save the KV in shared slots that the request overwrites. Check `is_hindered` first."""
        if (sharing := self._sharing) is None:
            return
        whole = {owner for owner in sharing.in_the_way(request, tokens) if not self.blocks_swapped_out(owner)}
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

    def _holders_ranked(self) -> list[tuple[Any, Request]]:
        if self._holders is None and len(self._draft.slices) == len(self._kv.holders()):
            self._holders = []  # all of them run
        if self._holders is None:
            rank, blocks_of = self._rank, self._kv.blocks_of
            returns_overlapped = self._policies.eviction.returns_overlapped
            plan_id = self._context.plan_id
            able = []
            for request in self._kv.holders():
                if request.progress.last_plan == plan_id or request.progress.finish_reason is not None:
                    continue
                held = blocks_of(request)
                if held is None or held.moving is not None:
                    continue
                if held.device or not returns_overlapped(request):
                    able.append((rank(request), request))
            self._holders = sorted(able, key=itemgetter(0))
        return self._holders

    def _evictable(self, request: Request, parent: Owner, *, grows: bool) -> Iterator[Request]:
        """Iterate over requests that may be evicted for this one once no plan in flight contains them, worst first.

        Unless the request grows, a running one must have generated a token since it got its KV. Otherwise two requests
        could evict each other endlessly. Best-effort requests cannot evict real-time ones.
        """
        reservations, latest, blocks_of = self._reservations, self._context.latest, self._kv.blocks_of
        owners = reservations.sources(request, parent) if reservations is not None else frozenset[Owner]()
        for victim in self._ranked_below(request, grows=grows):
            held = blocks_of(victim)
            if held is None or not held.device or (held.moving is not None and victim not in self._leaving):
                continue
            if reservations is not None and not reservations.returns_to(victim, owners):
                continue
            if not grows and _is_protected(victim, request, latest):
                continue
            yield victim

    def _ranked_below(self, request: Request, *, grows: bool) -> Iterator[Request]:
        """Iterate over the holders ranked after `request`, worst first; unless it grows, only those that it outranks.

        Most evictions need few, so the start is searched in chunks of doubling size.
        """
        holders, own, outranks = self._holders_ranked(), self._rank(request), self._policies.ordering.outranks

        def is_below(ranked: tuple[Any, Request]) -> bool:
            return bool(own < ranked[0]) and (grows or outranks(request, ranked[1]))

        end, size = len(holders), 1
        while end:
            chunk = max(0, end - size)
            start = chunk if is_below(holders[chunk]) else bisect_left(holders, True, chunk + 1, end, key=is_below)
            for _, holder in reversed(holders[start:end]):
                yield holder
            if start > chunk:
                return
            end, size = chunk, 2 * size

    def _share(self, eviction: Eviction, borrower: Request | None) -> bool:
        """Share the victim's blocks bidirectionally, if asked."""
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
        """Drop the KV of requests ranked last, to make room on the CPU tier, and return its tokens.

        Only requests ranked after the victim lose KV, and none if that would not suffice.
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
            self._context.pausing.add(victim)
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


def _is_protected(victim: Request, request: Request, latest: int) -> bool:
    """Return whether the victim keeps its KV until its next token, which it may have to wait for step by step.

    A best-effort prompt beside chat has chunks of few tokens, for which no real-time request waits.
    """
    progress = victim.progress
    is_of_class = progress.band[0] <= request.progress.band[0]
    return is_of_class and progress.is_newly_resident and progress.last_plan >= latest
