from __future__ import annotations

from collections.abc import Iterable, Iterator

from skipjoin.core.context import StepContext, eligible_tokens
from skipjoin.core.decide.holders import RankedHolders
from skipjoin.core.decide.place import Blocked, Placer
from skipjoin.core.kv.interface import MISS, Hit, KVAccounts
from skipjoin.core.policy import Allocation, Deferral, Ordering
from skipjoin.core.policy_set import Policies
from skipjoin.core.promises import may_await_prefix
from skipjoin.core.request import Request

# Maximum time that a request waits for a prefix that another one computes, in seconds.
MAX_BEHIND_S = 5.0


def find_candidates(
    policies: Policies,
    kv: KVAccounts,
    placer: Placer,
    ranked: RankedHolders,
    context: StepContext,
    *,
    led_since: dict[Request, float],
) -> Iterator[tuple[Request, int]]:
    """Iterate over the requests that find blocks: a dry run of the placer's rules on a count of blocks."""
    blocks_of, supply, holders = kv.blocks_of, _Supply(kv, ranked), 0
    donors, pausing = supply.donors, context.pausing
    for request in policies.ordering.ranked(context.now):
        held, progress = blocks_of(request), request.progress
        holders += held is not None
        tokens = progress.known - progress.planned
        # Most requests decode, of which `eligible_tokens` would say the same.
        if tokens != 1 or progress.pending_samples or progress.awaits_grammar or (pausing and request in pausing):
            tokens = eligible_tokens(request, context)
        if not tokens or (donors and request in donors):
            continue
        target = progress.planned + tokens
        if held is not None and target <= held.room and held.is_settled:  # most requests
            yield request, tokens
            continue
        hit = MISS if held is not None else kv.hit(request)
        if held is None and comes_soon(request, hit, context, policies.ordering, led_since):
            continue
        is_covered = held is not None and target <= progress.reserved_tokens
        allocation = None if is_covered else placer.ask(request, target)
        if isinstance(allocation, Blocked) and (held is not None or allocation.closes is Deferral.REQUEST):
            continue
        if held is None:
            if supply.is_awaited or not isinstance(allocation, Allocation):
                break
            if not supply.take(request, placer.size_of(allocation, target) - hit.held, allocation.spare):
                break
        elif placer.waits_for_move(request, held) is not None or (
            held.swapped_out
            and not supply.take_back(request, held.swapped_out, placer.spare_of_return(request, target))
        ):
            continue
        yield request, tokens - hit.tokens
    else:
        return
    if holders < len(kv.holders()):
        yield from _resident(ranked.after(request), kv, context, supply)


def _resident(
    holders: Iterable[Request], kv: KVAccounts, context: StepContext, supply: _Supply
) -> Iterator[tuple[Request, int]]:
    for holder in holders:
        held = kv.blocks_of(holder)
        if held is None or not held.device or held.swapped_out or holder in supply.donors:
            continue
        if tokens := eligible_tokens(holder, context):
            yield holder, tokens


def comes_soon(
    request: Request, hit: Hit, context: StepContext, ordering: Ordering, led_since: dict[Request, float]
) -> bool:
    """Return whether the request should wait for a prefix that a running, not less important one computes."""
    leader = hit.leader
    if leader is None or leader.progress.finish_reason is not None or leader.progress.band > request.progress.band:
        return False
    if leader.progress.last_plan < context.latest or not may_await_prefix(ordering, request, context.now):
        return False
    return context.now < led_since.setdefault(request, context.now) + MAX_BEHIND_S


class _Supply:
    """Count of the device blocks that candidates can still take."""

    def __init__(self, kv: KVAccounts, ranked: RankedHolders) -> None:
        self.donors: set[Request] = set()  # least important best-effort ones, whose blocks real-time ones take
        self.is_awaited = False  # whether a swapped-out request waits for blocks
        self._kv = kv
        self._ranked = ranked
        self._free = kv.available
        self._given = 0  # blocks of donors, for real-time ones
        self._more: Iterator[Request] | None = None  # further donors

    def take(self, request: Request, blocks: int, spare: int) -> bool:
        missing = blocks + spare - self._free
        if not request.progress.band[0] and missing > 0:
            self._collect(request, missing)
            missing -= self._given
        if missing > 0:
            return False
        taken = blocks if request.progress.band[0] else min(blocks, max(0, self._free))
        self._free -= taken
        self._given -= blocks - taken
        return True

    def take_back(self, request: Request, blocks: int, spare: int | None) -> bool:
        is_taken = self.take(request, blocks, spare or 0)
        self.is_awaited = self.is_awaited or (spare is not None and not is_taken)
        return is_taken

    def _collect(self, request: Request, blocks: int) -> None:
        if self._more is None:  # real-time requests precede all of them in rank order
            self._more = iter(self._ranked.best_effort_below(request))
        while self._given < blocks and (donor := next(self._more, None)) is not None:
            self.donors.add(donor)
            self._given += self._kv.footprint(donor)
