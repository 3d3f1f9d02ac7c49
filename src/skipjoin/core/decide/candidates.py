from __future__ import annotations

from collections.abc import Iterator

from skipjoin.core.context import StepContext, eligible_tokens
from skipjoin.core.decide.evict import Evictor
from skipjoin.core.kv.interface import MISS, Hit, KVAccounts
from skipjoin.core.policy import Allocation, Deferral, Ordering, Policies
from skipjoin.core.promises import may_await_prefix
from skipjoin.core.request import Request

# Maximum time that a request waits for a prefix that another one computes, in seconds.
MAX_BEHIND_S = 5.0


def find_candidates(
    policies: Policies, kv: KVAccounts, evictor: Evictor, context: StepContext
) -> Iterator[tuple[Request, int]]:
    admission, blocks_of, returns_overlapped = policies.admission, kv.blocks_of, policies.eviction.returns_overlapped
    space = _Space(policies, kv, evictor)
    for request in policies.ordering.ranked(context.now):
        if not (tokens := eligible_tokens(request, context)) or request in space.donors:
            continue
        held, target = blocks_of(request), request.planned + tokens
        hit = kv.hit(request) if held is None else MISS
        if comes_soon(request, hit, context, policies.ordering):
            continue
        away = held.away if held is not None else 0
        is_covered = held is not None and target <= request.reserved_tokens
        allocation = None if is_covered else admission.reserve(request, target, kv)
        if allocation is Deferral.REQUEST or (allocation is Deferral.NEWCOMERS and held is not None):
            continue
        if held is None:
            if not space.admit(request, allocation, hit.held):
                break
        elif held.moving is not None or (
            away and (returns_overlapped(request) or not space.take_back(request, target))
        ):
            continue
        yield request, tokens - hit.tokens
    else:
        return
    for holder in evictor.holders_after(request):
        held = blocks_of(holder)
        if held is None or not held.device or held.away or holder in space.donors:
            continue
        if tokens := eligible_tokens(holder, context):
            yield holder, tokens


def spare_of_return(policies: Policies, kv: KVAccounts, request: Request, target: int) -> int | None:
    """Return how many blocks stay free when the request is swapped in alongside slices: as many as at an admission.

    Without them, the next newcomer would take the blocks back.

    Returns:
        None for a request that is swapped in by a blocking move.
    """
    if not policies.eviction.returns_alongside(request):
        return None
    allocation = policies.admission.reserve(request, target, kv)
    return allocation.spare if isinstance(allocation, Allocation) else 0


def comes_soon(request: Request, hit: Hit, context: StepContext, ordering: Ordering) -> bool:
    """Return whether the request should wait for a running request that computes a prefix it can reuse.

    It waits only for a leader of at least equal importance, for at most `MAX_BEHIND_S`, and as long as its ordering
    allows.
    """
    leader = hit.leader
    if leader is None or leader.finish_reason is not None or leader.band > request.band:
        return False
    if leader.last_plan < context.latest or not may_await_prefix(ordering, request, context.now):
        return False
    request.led_since = min(request.led_since, context.now)
    return context.now < request.led_since + MAX_BEHIND_S


class _Space:
    """Device blocks that candidates can still take.

    Attributes:
        donors: Least important best-effort requests, whose blocks real-time candidates take. Best-effort candidates do
            not get their surplus, because an eviction may leave it in place.
        is_awaited: Whether a swapped-out request waits for blocks, which newcomers must leave to it.
    """

    def __init__(self, policies: Policies, kv: KVAccounts, evictor: Evictor) -> None:
        self.donors: set[Request] = set()
        self.is_awaited = False
        self._policies = policies
        self._kv = kv
        self._evictor = evictor
        self._free = kv.available
        self._given = 0  # blocks of donors, for real-time ones
        self._donors: Iterator[Request] | None = None

    def take(self, request: Request, blocks: int, spare: int) -> bool:
        if request.band[0]:
            if blocks + spare > self._free:
                return False
            self._free -= blocks
            return True
        self._collect(request, blocks + spare - self._free)
        if blocks + spare > self._free + self._given:
            return False
        taken = min(blocks, max(0, self._free))
        self._free -= taken
        self._given -= blocks - taken
        return True

    def admit(self, request: Request, allocation: Allocation | Deferral | None, found: int) -> bool:
        """Take blocks for a request without KV, except the `found` ones of its prefix-cache hit."""
        if self.is_awaited or not isinstance(allocation, Allocation):
            return False
        return self.take(request, max(allocation.now, allocation.blocks) - found, allocation.spare)

    def take_back(self, request: Request, target: int) -> bool:
        """Take blocks for a swapped-out request."""
        spare = spare_of_return(self._policies, self._kv, request, target)
        is_taken = self.take(request, self._evictor.blocks_away(request), spare or 0)
        self.is_awaited = self.is_awaited or (spare is not None and not is_taken)
        return is_taken

    def _collect(self, request: Request, blocks: int) -> None:
        while self._given < blocks:
            if self._donors is None:  # real-time requests precede all of them in rank order
                self._donors = iter(self._evictor.best_effort_below(request))
            if (donor := next(self._donors, None)) is None:
                return
            self.donors.add(donor)
            self._given += self._kv.footprint(donor)
