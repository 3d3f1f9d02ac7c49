from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from skipjoin.core.kv.interface import KVAccounts, Tiered
from skipjoin.core.policy import CostModel, Ordering
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, StepShape
from skipjoin.policies.arrivals import ArrivalHistory
from skipjoin.policies.eviction import DROP_SHARE, Swap

# Share of the device kept free for the growth of running requests, and maximum share kept free for arrivals.
_GROWTH_SHARE, _MAX_SPARE = 0.01, 0.1
# The latter where some arrivals may not evict: blocks for a long prompt that waits all the same would idle.
_MAX_SPARE_SOME = 0.02
# Steps by which transfers are started ahead: a transfer decided now completes by the step after next.
_LEAD_STEPS = 2
# Transfers are cheap if moving a request's KV takes at most this share of a step.
_CHEAP_SHARE = 0.05
# Maximum share of the device that idles because a request with more blocks than are kept free leaves for them.
_MAX_OVERSHOOT = 0.05
# Weight of the latest step in the mean step time.
_STEP_RATE = 0.1


class ProactiveSwap(Swap):
    """Proactive swapping (FastServe section 4.2), overlapped with steps and ordered by next scheduled time.

    While blocks are short, the request scheduled last is swapped out first, and the one scheduled soonest is swapped in
    first. Swaps are blocking where that does not suffice, and where transfers take next to no time.

    Args:
        slots: Maximum number of requests of a step. Only as many of the first ones, and a quarter more, are swapped in:
            others would have to leave again before they run. None swaps in all.
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        slots: int | None = None,
        drop_share: float = DROP_SHARE,
        exempts_first: bool = False,
    ) -> None:
        super().__init__(cost, drop_share=drop_share, exempts_first=exempts_first)
        self.reach = None if slots is None else slots + slots // 4 + 1
        self._is_cheap = False  # whether transfers are cheap
        self._arrivals = ArrivalHistory()
        self._new: list[tuple[float, Request]] = []  # arrivals since the last step, with their times
        self._last: float | None = None
        self._step_s = 0.0

    def returns_overlapped(self, request: Request) -> bool:
        return not self._is_cheap

    def on_arrived(self, request: Request, now: float) -> None:
        self._new.append((now, request))

    def ahead(
        self, still: Sequence[Request], ordering: Ordering, kv: KVAccounts, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        self._time_step(now, is_idle=not still)
        tiers = kv.tiers
        assert tiers is not None, "only a ledger with a CPU tier swaps ahead"
        arrived = self._note_arrivals(still, ordering, kv)
        spare = self._spare(kv, now)
        free = kv.available + tiers.blocks_in_transit[Direction.OUT] - spare
        awaited = max(arrived, self._awaited(still, ordering, kv, now, free))
        spare += awaited
        self._is_cheap = self._finds_moves_cheap(len(still), kv, tiers)
        if self._is_cheap:
            return (), ()
        short = spare - kv.available - tiers.blocks_in_transit[Direction.OUT]
        if not still or (short <= 0 and tiers.cpu_free == tiers.cpu_total):
            return (), ()
        exchange = _Exchange(self, kv, tiers, spare)
        if not exchange.is_possible:
            return (), ()
        turns = ordering.expected_order(still, now)
        return exchange.choose(turns, partial(self._needed_before, ordering, kv, now), awaited)

    def _note_arrivals(self, still: Sequence[Request], ordering: Ordering, kv: KVAccounts) -> int:
        """Learn when requests arrive that may evict others, and return the blocks that the latest of them need.

        No others get blocks that are kept free while requests that precede them could use these.
        """
        if not self._new:
            return 0
        new, self._new = self._new, []
        last, arrived = max(still, key=ordering.rank, default=None), 0
        for then, request in new:
            if request.progress.finish_reason is None and (last is None or ordering.outranks(request, last)):
                self._arrivals.note(request, then)
                arrived += kv.blocks_for(request.progress.known)
        return arrived

    def _needed_before(self, ordering: Ordering, kv: KVAccounts, now: float, free: int) -> Mapping[Request, int]:
        """Return how many blocks the requests without KV need that precede each request with KV.

        Those behind more than `free` needed blocks are left out.
        """
        found, needed = dict[Request, int](), 0
        for request in ordering.ranked(now):
            if kv.blocks_of(request) is not None:
                found[request] = needed
            elif not request.progress.awaits_grammar:
                needed += kv.blocks_for(request.progress.known)
                if needed > free:
                    break
        return found

    def _finds_moves_cheap(self, holders: int, kv: KVAccounts, tiers: Tiered) -> bool:
        """Return whether moving an average request's KV is negligible next to a decode step of all KV on the device."""
        used = kv.device_total - kv.device_free
        step = StepShape(decodes=max(1, holders), context=used * kv.block_size)
        held = used + tiers.cpu_total - tiers.cpu_free
        return self._cost.transfer(held // max(1, len(kv.holders()))) <= _CHEAP_SHARE * self._cost.step(step)

    def may_move_ahead(self, request: Request, kv: KVAccounts) -> bool:
        """Return whether the request may be swapped out with an overlapped move.

        The move may be slower than recomputation. If only KV that is slow to recompute moved, short requests would stay
        on the device while older ones wait behind the limited pace of drops.
        """
        progress = request.progress
        return progress.known - progress.computed <= 1 and not progress.is_newly_resident

    def may_overshoot(self, blocks: int, kv: KVAccounts) -> bool:
        """Return whether a request may leave that frees `blocks` more than the blocks kept free need."""
        return True

    def link_room(self, direction: Direction, kv: KVAccounts, tiers: Tiered) -> int:
        """Return how many blocks may still start to move in `direction` without queueing, positive on an idle link."""
        seconds = self._cost.transfer(1)
        within = int(_LEAD_STEPS * self._step_s / seconds) if seconds > 0 else kv.device_total
        return max(1, within) - tiers.blocks_in_transit[direction]

    def _time_step(self, now: float, *, is_idle: bool) -> None:
        if self._last is not None:
            seconds = now - self._last
            self._step_s += (_STEP_RATE if self._step_s else 1) * (seconds - self._step_s)
        # Idle time without KV holders is not a step.
        self._last = None if is_idle else now

    def _spare(self, kv: KVAccounts, now: float) -> int:
        return max(1, int(_GROWTH_SHARE * kv.device_total)) + self._expected(kv, now)

    def _expected(self, kv: KVAccounts, now: float) -> int:
        tokens = self._arrivals.tokens_within(_LEAD_STEPS * self._step_s, now)
        return min(kv.blocks_for(int(tokens)), int(_MAX_SPARE * kv.device_total))

    def _awaited(self, still: Sequence[Request], ordering: Ordering, kv: KVAccounts, now: float, free: int) -> int:
        """Return the blocks needed by requests without KV that precede every request with KV; 0 if `free` suffices."""
        most = int(_MAX_SPARE * kv.device_total)
        if free >= most:
            return 0
        needed, last = 0, None
        for request in ordering.ranked(now):
            if needed >= most or kv.blocks_of(request) is not None:
                break
            if still and last is None:
                last = max(still, key=ordering.rank)
            if last is not None and not ordering.outranks(request, last):
                break
            needed += kv.blocks_for(request.progress.known)
        return needed


class DisplacingSwap(ProactiveSwap):
    """`ProactiveSwap` that drops the KV ranked last where the CPU tier is full.

    It moves no KV ahead that a step of its own would compute sooner, since the blocks are of no use while they move. It
    keeps few blocks free for expected arrivals, since its ordering does not let all of them take KV from others, and
    none where KV is sooner computed than moved.
    """

    displaces = True

    def may_move_ahead(self, request: Request, kv: KVAccounts) -> bool:
        is_possible = super().may_move_ahead(request, kv)
        return is_possible and self._both_moves_s(request, kv) <= self._again_s(request, kv)

    def may_overshoot(self, blocks: int, kv: KVAccounts) -> bool:
        return blocks <= _MAX_OVERSHOOT * kv.device_total

    def _expected(self, kv: KVAccounts, now: float) -> int:
        blocks = min(super()._expected(kv, now), int(_MAX_SPARE_SOME * kv.device_total))
        tokens = blocks * kv.block_size
        again_s = self._cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))
        return blocks if 2 * self._cost.transfer(blocks) <= again_s else 0


class _Exchange:
    def __init__(self, eviction: ProactiveSwap, kv: KVAccounts, tiers: Tiered, spare: int) -> None:
        self._eviction = eviction
        self._kv = kv
        self._footprint = tiers.cpu_footprint
        self._free = kv.available - spare  # free for swapping in
        self._soon = self._free + tiers.blocks_in_transit[Direction.OUT]  # including blocks in transit out
        self._room = {direction: eviction.link_room(direction, kv, tiers) for direction in LINK}
        self._out: list[Request] = []

    @property
    def is_possible(self) -> bool:
        return max(self._room.values()) > 0

    def choose(
        self, turns: list[tuple[Any, Request]], needed_before: Callable[[int], Mapping[Request, int]], awaited: int
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        on_cpu: list[tuple[Any, Request]] = []
        on_device: list[tuple[Any, Request]] = []
        wanted, reach = 0, self._eviction.reach
        for place, ranked in enumerate(turns):
            if self._footprint(ranked[1]):
                on_cpu.append(ranked)
                wanted += reach is None or place < reach
            else:
                on_device.append(ranked)
        self._awaited = awaited
        self._leaving = on_device[::-1]
        self._at = 0
        self._make_room(0, None)
        back: list[Request] = []
        stands_still = len(on_cpu) == len(self._kv.holders())
        before = needed_before(max(0, self._free) + awaited) if wanted and self._room[Direction.IN] > 0 else {}
        for turn, request in on_cpu[:wanted]:
            blocks = self._footprint(request)
            if self._room[Direction.IN] <= 0:
                break
            # Requests without KV that precede it would evict it before it runs.
            others = max(0.0, before.get(request, math.inf) - awaited)
            if others and blocks + others > self._free and not (stands_still and not back):
                break
            if blocks <= self._free or (stands_still and not back):
                back.append(request)
                self._free -= blocks
                self._room[Direction.IN] -= blocks
            elif self._make_room(blocks, turn):
                self._free -= blocks  # collected for this request, so that no smaller one behind it takes them
            else:
                break
            self._soon -= blocks
        return self._out, back

    def _make_room(self, blocks: int, turn: Any) -> bool:
        leaving, kv = self._leaving, self._kv
        while self._soon < blocks and self._room[Direction.OUT] > 0 and self._at < len(leaving):
            theirs, victim = leaving[self._at]
            # Do not evict the request scheduled next for blocks that no request waits for: alone, it would be swapped
            # in and out repeatedly.
            if self._at == len(leaving) - 1 if turn is None else not turn < theirs:
                break
            over = kv.footprint(victim) - (blocks - self._soon)
            if turn is None and not self._awaited and not self._eviction.may_overshoot(over, kv):
                break
            self._at += 1
            if self._eviction.may_move_ahead(victim, kv):
                self._out.append(victim)
                self._soon += kv.footprint(victim)
                self._room[Direction.OUT] -= kv.footprint(victim)
        return self._soon >= blocks
