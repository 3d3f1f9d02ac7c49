from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator
from operator import attrgetter, itemgetter
from typing import Any

from skipjoin.core.context import StepContext
from skipjoin.core.decide.draft import Draft
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Owner
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Band, Request
from skipjoin.core.selective import lacks_kv

_BAND_OF: Callable[[Request], Band] = attrgetter("progress.band")


class RankedHolders:
    """Requests with blocks in rank order: those that this step may still run, and those that it may evict.

    Those that are `leaving` in part may be evicted although they are in transit.
    """

    def __init__(
        self, policies: Policies, kv: KVAccounts, context: StepContext, draft: Draft, leaving: Container[Request]
    ) -> None:
        self._policies = policies
        self._rank = policies.ordering.rank
        self._kv = kv
        self._reservations = kv.reservations
        self._context = context
        self._draft = draft
        self._leaving = leaving
        self._ranked: list[tuple[Any, Request]] | None = None  # with KV on the device, best first; sorted on first use
        self._swapped_out: list[Request] = []  # others that the step may swap in; found with the ranked ones

    def after(self, last: Request) -> list[Request]:
        rank, ranked = self._rank, self._all_ranked()
        if self._swapped_out:
            ranked = sorted([*ranked, *((rank(request), request) for request in self._swapped_out)], key=itemgetter(0))
        floor = rank(last)
        return [request for rank_, request in ranked if rank_ > floor]

    def reserved_after(self, last: Request) -> list[Request]:
        """Return those that need no admission, which are few in the steps that ask."""
        if len(self._draft.slices) == len(self._kv.holders()):
            return []  # all of them run
        kv, rank, floor = self._kv, self._rank, self._rank(last)
        found = [
            (rank(request), request)
            for request in self._idle()
            if not lacks_kv(request, kv) and (held := kv.blocks_of(request)) is not None and held.moving is None
        ]
        return [request for rank_, request in sorted(found, key=itemgetter(0)) if rank_ > floor]

    def best_effort_below(self, request: Request) -> list[Request]:
        if not any(band[0] for band in {*map(_BAND_OF, self._kv.holders())}):
            return []  # ranking all holders takes longer
        below = self.evictable(request, None, grows=False)
        able = [victim for victim in below if victim.progress.band[0] and not victim.progress.in_flight]
        return sorted(able, key=lambda victim: not blocks_swapped_out(self._kv, victim))

    def others(self, request: Request) -> list[Request]:
        blocks_of = self._kv.blocks_of
        found = (holder for _, holder in reversed(self._all_ranked()))
        return [
            holder
            for holder in found
            if holder is not request and (held := blocks_of(holder)) is not None and held.device
        ]

    def evictable(self, request: Request, parent: Owner, *, grows: bool) -> Iterator[Request]:
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
            if not grows and is_protected(victim, request, latest):
                continue
            yield victim

    def _ranked_below(self, request: Request, *, grows: bool) -> Iterator[Request]:
        """Iterate over the holders ranked after `request`, worst first; unless it grows, only those that it outranks.

        Most evictions need few, so the start is searched in chunks of doubling size.
        """
        holders, own, outranks = self._all_ranked(), self._rank(request), self._policies.ordering.outranks

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

    def _all_ranked(self) -> list[tuple[Any, Request]]:
        if self._ranked is None and len(self._draft.slices) == len(self._kv.holders()):
            self._ranked = []  # all of them run
        if self._ranked is None:
            rank, blocks_of = self._rank, self._kv.blocks_of
            returns_overlapped = self._policies.eviction.returns_overlapped
            able = []
            for request in self._idle():
                held = blocks_of(request)
                if held is None or held.moving is not None:
                    continue
                if held.device:
                    able.append((rank(request), request))
                elif not returns_overlapped(request):
                    self._swapped_out.append(request)
            self._ranked = sorted(able, key=itemgetter(0))
        return self._ranked

    def _idle(self) -> list[Request]:
        plan_id = self._context.plan_id
        return [
            request
            for request in self._kv.holders()
            if (progress := request.progress).last_plan != plan_id and progress.finish_reason is None
        ]


def blocks_swapped_out(kv: KVAccounts, request: Request) -> int:
    held = kv.blocks_of(request)
    return held.swapped_out if held is not None else 0


def is_protected(victim: Request, request: Request, latest: int) -> bool:
    """Return whether the victim keeps its KV until its next token, which it may have to wait for step by step.

    A best-effort prompt alongside chat has chunks of few tokens, for which no real-time request waits.
    """
    progress = victim.progress
    is_of_class = progress.band[0] <= request.progress.band[0]
    return is_of_class and progress.is_newly_resident and progress.last_plan >= latest
