"""Eviction policies: what leaves the device when space is short, and what moves ahead of need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from skipjoin.core.events import Preemption
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import CostModel, Eviction, Ordering
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, StepShape
from skipjoin.policies.arrivals import ArrivalHistory

# Share of the time that computing again what newcomers made others lose may take.
DROP_SHARE = 0.05


def _until_enough(short: int, candidates: Sequence[Request], kv: KVAccounts) -> Iterator[tuple[Request, int]]:
    """The first candidates that free enough, each with how many blocks are short without it."""
    for victim in candidates:
        if short <= 0:
            return
        yield victim, short
        short -= kv.footprint(victim)


class Recompute:
    """The least important make way, their KV is dropped, and they compute it again when they return (FastServe
    section 4.2, strawman 2)."""

    rests = True
    lends = False

    def returns_overlapped(self, request: Request) -> bool:
        return False

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        return [Eviction(victim, Preemption.DROP) for victim, _ in _until_enough(short, candidates, kv)]

    def dropped(self, tokens: int, now: float) -> None:
        pass

    def ahead(
        self, still: Sequence[Request], ordering: Ordering, kv: KVAccounts, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        return (), ()


class Defer(Recompute):
    """Requests that hold KV keep it, and newcomers wait, whatever their rank; only growth evicts the least important
    (FastServe section 4.2, strawman 1)."""

    rests = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        return super().victims(short, candidates, kv, now, newcomer) if newcomer is None else ()


class KeepKv(Recompute):
    """The KV of the least important goes to the host with blocking moves, and returns with a blocking move of the step
    that runs them. It is dropped only where the host is full."""

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        return [Eviction(victim, Preemption.SWAP) for victim, _ in _until_enough(short, candidates, kv)]


class Swap(Recompute):
    """The KV of the least important goes to the host with blocking moves, and returns with a blocking move of the step
    that runs them: reactive swapping (FastServe section 4.2).

    An unfinished prefill is dropped, not swapped; so is what the host has no room for, and what is computed again in
    less time than it takes to move it out and back. Dropping for newcomers is paced: with a full host pool above
    capacity every newcomer would cost another request its work, and computing that again takes the time to finish
    anything.

    cost: of steps and transfers. drop_share: share of the time that it may take to compute again what newcomers made
    others lose; a newcomer of an earlier band than its victim does not wait for that. Infinite: nothing is paced.
    """

    rests = True

    def __init__(self, cost: CostModel, *, drop_share: float = DROP_SHARE) -> None:
        if not drop_share > 0:
            raise ValueError(f"drop_share must be above 0, got {drop_share}")
        self._cost = cost
        self._drop_share = drop_share
        self._next_drop = -math.inf  # none before, for a newcomer

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        found = []
        room, is_free = kv.host_free, newcomer is None or now >= self._next_drop
        for victim, missing in _until_enough(short, candidates, kv):
            part = self.part(victim, missing, kv)
            filled, keep = kv.filled(victim), 0 if part is None else kv.filled_after(victim, part)
            if (filled == keep > 0) or (filled - keep <= room and self.is_worth_moving(victim, kv, keep)):
                room -= filled - keep
                found.append(Eviction(victim, Preemption.SWAP if part is None else Preemption.SPILL, part))
            elif is_free or (newcomer is not None and newcomer.band < victim.band):
                found.append(Eviction(victim, Preemption.DROP, part))
            else:
                return ()
        return found

    def part(self, victim: Request, missing: int, kv: KVAccounts) -> int | None:
        """How many blocks the victim gives up where so many are short; None: all."""
        return None

    def dropped(self, tokens: int, now: float) -> None:
        seconds = self._cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))
        self._next_drop = max(now, self._next_drop) + seconds / self._drop_share

    def is_worth_moving(self, request: Request, kv: KVAccounts, keep: int = 0) -> bool:
        """Whether the request has its prompt behind it, and its KV behind the first `keep` blocks goes and returns
        faster than it is recomputed."""
        return request.known - request.computed <= 1 and self._moves_faster(request, kv, keep)

    def _moves_faster(self, request: Request, kv: KVAccounts, keep: int) -> bool:
        kept = kv.tokens_in(request, keep)
        tokens = request.computed - kept
        again = StepShape(prefill=tokens, attention=tokens * kept + tokens * (tokens + 1) // 2)
        # The recomputation shares its step with others: what a step costs anyway is not its price.
        price = self._cost.step(again) - self._cost.step(StepShape())
        return 2 * self._cost.transfer(kv.filled(request) - keep) <= price


class Vacate(Swap):
    """No KV leaves the device but where its host needs the blocks that it was lent (EconoServe section 3.2), or where
    nothing runs. Then guests make way before others."""

    rests = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        guests = [one for one in candidates if isinstance(kv.lender_of(one), Request)]
        others = [one for one in candidates if not isinstance(kv.lender_of(one), Request)]
        return super().victims(short, guests + others, kv, now, newcomer)


class Spill(Swap):
    """Only as many blocks as are short leave the device, the last ones of best-effort requests, with blocking moves
    (BROS section 5.2, whose unit is the slot). Their request waits until it can have all on the device again.

    Best-effort requests come first, and among them those that have KV on the host already: they wait as it is, so fewer
    requests do. Real-time requests make way last, and whole. What the host has no room for is dropped, at the pace of
    `Swap`, and so is what is computed again in less time than it takes to move it out and back; an unfinished prefill
    is no exception.
    """

    rests = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        def place(victim: Request) -> tuple[bool, bool]:
            return not victim.is_best_effort, not kv.footprint_on_host(victim)

        return super().victims(short, sorted(candidates, key=place), kv, now, newcomer)

    def is_worth_moving(self, request: Request, kv: KVAccounts, keep: int = 0) -> bool:
        return self._moves_faster(request, kv, keep)

    def part(self, victim: Request, missing: int, kv: KVAccounts) -> int | None:
        return missing if victim.is_best_effort and missing < kv.footprint(victim) else None


class Lend(Spill):
    """As `Spill`, but the blocks that are short are lent: a real-time request fills blocks of best-effort ones from the
    other end, the emptiest first, and only the slots that it overwrites leave the device, before it does (BROS section
    5). What makes way for another best-effort request, or for one whose own KV is on the host, leaves as with `Spill`.
    """

    rests = True
    lends = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        # Real-time requests lend nothing, and stay in their order: the least urgent one first.
        emptiest = sorted(candidates, key=lambda victim: -kv.empty_slots(victim) if victim.is_best_effort else 0)
        found = super().victims(short, emptiest, kv, now, newcomer)
        return [one._replace(lent=one.request.reverse and one.how is not Preemption.DROP) for one in found]

    def is_worth_moving(self, request: Request, kv: KVAccounts, keep: int = 0) -> bool:
        # What is lent costs nothing until it is overwritten, and no more than that.
        return request.reverse or super().is_worth_moving(request, kv, keep)


# Share of the device that stays free for the growth of running requests, and most that may stay free in all.
_GROWTH_SHARE, _MOST_SPARE = 0.01, 0.1
# How far ahead moves are begun, in steps: what is decided now is on the device by the step after next.
_LEAD_STEPS = 2
# A copy is cheap if moving what a request holds takes this share of a step or less.
_CHEAP_SHARE = 0.05
# How fast the estimate of a step's time follows the steps.
_STEP_RATE = 0.1


class ProactiveSwap(Swap):
    """Swapping ahead of need (FastServe section 4.2): KV moves overlapped with steps, in the order in which its
    requests are expected to run next. While blocks are short, the request that runs last leaves first; the one that
    runs soonest returns first, into free blocks or in place of requests that run later.

    Blocks stay free for requests that are still to arrive, as many as the history of arrivals suggests, and for the
    growth of running requests. Only where that does not suffice is a request evicted with a blocking move.

    All this spends blocks, those that stay free and those in transit, to save time. Where a copy takes next to no time
    compared with a step, there is none to save, and KV moves with blocking moves of the step that needs it.
    """

    def __init__(self, cost: CostModel, *, drop_share: float = DROP_SHARE) -> None:
        super().__init__(cost, drop_share=drop_share)
        self._is_cheap = False  # to move KV
        self._arrivals = ArrivalHistory()
        self._new: list[Request] = []  # arrived since the last step
        self._last: float | None = None
        self._step_s = 0.0

    def returns_overlapped(self, request: Request) -> bool:
        return not self._is_cheap

    def arrived(self, request: Request, now: float) -> None:
        self._arrivals.note(request, now)
        self._new.append(request)

    def ahead(
        self, still: Sequence[Request], ordering: Ordering, kv: KVAccounts, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        self._time_step(now, is_idle=not still)
        spare = self._spare(kv, now)
        self._is_cheap = self._finds_moves_cheap(len(still), kv)
        if self._is_cheap:
            return (), ()
        short = spare - kv.available - kv.blocks_in_transit[Direction.OUT]
        if not still or (short <= 0 and kv.host_free == kv.host_total):
            return (), ()
        exchange = _Exchange(self, kv, spare)
        return exchange.choose(ordering.next_turns(still, now)) if exchange.is_possible else ((), ())

    def _finds_moves_cheap(self, holders: int, kv: KVAccounts) -> bool:
        """Whether moving what a request holds takes next to no time beside a decode of all that is on the device.

        By the profile, not by the time of late steps: moves before steps make those longer, and look cheap for it.
        """
        used = kv.device_total - kv.device_free
        step = StepShape(decodes=max(1, holders), context=used * kv.block_size)
        held = used + kv.host_total - kv.host_free
        return self._cost.transfer(held // max(1, kv.holder_count)) <= _CHEAP_SHARE * self._cost.step(step)

    def link_room(self, direction: Direction, kv: KVAccounts) -> int:
        """Blocks that may still begin to move that way: no more than the link moves in the time ahead, so that moves
        do not queue and decisions stay fresh; but always one request."""
        seconds = self._cost.transfer(1)
        within = int(_LEAD_STEPS * self._step_s / seconds) if seconds > 0 else kv.device_total
        return max(1, within) - kv.blocks_in_transit[direction]

    def _time_step(self, now: float, *, is_idle: bool) -> None:
        if self._last is not None:
            seconds = now - self._last
            self._step_s += (_STEP_RATE if self._step_s else 1) * (seconds - self._step_s)
        # Time that passes while no request holds KV is no step.
        self._last = None if is_idle else now

    def _spare(self, kv: KVAccounts, now: float) -> int:
        """Device blocks to keep free."""
        tokens = self._arrivals.tokens_within(_LEAD_STEPS * self._step_s, now)
        new, self._new = self._new, []
        arrived = sum(kv.blocks_for(request.known) for request in new if request.finish_reason is None)
        growth = max(1, int(_GROWTH_SHARE * kv.device_total))
        reserved = min(kv.blocks_for(int(tokens)), int(_MOST_SPARE * kv.device_total))
        return growth + reserved + arrived


class _Exchange:
    """One choice of the requests that leave and that return."""

    def __init__(self, eviction: ProactiveSwap, kv: KVAccounts, spare: int) -> None:
        self._eviction = eviction
        self._kv = kv
        self._free = kv.available - spare  # blocks to come back into
        self._soon = self._free + kv.blocks_in_transit[Direction.OUT]  # when those on their way out have left
        self._room = {direction: eviction.link_room(direction, kv) for direction in LINK}
        self._out: list[Request] = []

    @property
    def is_possible(self) -> bool:
        """Whether the link can take anything more, either way."""
        return max(self._room.values()) > 0

    def choose(self, turns: list[tuple[Any, Request]]) -> tuple[Sequence[Request], Sequence[Request]]:
        """turns: as `Ordering.next_turns` tells them."""
        kv = self._kv
        on_host: list[tuple[Any, Request]] = []
        on_device: list[tuple[Any, Request]] = []
        for one in turns:
            (on_host if kv.footprint_on_host(one[1]) else on_device).append(one)
        self._leaving = on_device[::-1]
        self._at = 0
        self._make_room(0, None)
        back: list[Request] = []
        stands_still = len(on_host) == self._kv.holder_count
        for turn, request in on_host:
            blocks = self._kv.footprint_on_host(request)
            if self._room[Direction.IN] <= 0:
                break
            if blocks <= self._free or (stands_still and not back):
                back.append(request)
                self._free -= blocks
                self._room[Direction.IN] -= blocks
            elif not self._make_room(blocks, turn):
                break
            self._soon -= blocks
        return self._out, back

    def _make_room(self, blocks: int, turn: Any) -> bool:
        """Let those leave whose turn is last, and later than `turn`, until `blocks` blocks will be free."""
        leaving, kv = self._leaving, self._kv
        while self._soon < blocks and self._room[Direction.OUT] > 0 and self._at < len(leaving):
            theirs, victim = leaving[self._at]
            # Room that no request waits for yet is not worth evicting the one that runs next: alone, it would come and
            # go.
            if self._at == len(leaving) - 1 if turn is None else not turn < theirs:
                break
            self._at += 1
            if self._eviction.is_worth_moving(victim, kv):
                self._out.append(victim)
                self._soon += kv.footprint(victim)
                self._room[Direction.OUT] -= kv.footprint(victim)
        return self._soon >= blocks
