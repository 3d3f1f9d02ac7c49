from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from skipjoin.core.events import Preemption
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import CostModel, Eviction, Ordering
from skipjoin.core.promises import must_precede
from skipjoin.core.request import Request
from skipjoin.core.step import StepShape

# Maximum share of the time spent on recomputing KV that was dropped for new requests.
DROP_SHARE = 0.05


def _until_enough(short: int, candidates: Iterable[Request], kv: KVAccounts) -> Iterator[tuple[Request, int]]:
    for victim in candidates:
        if short <= 0:
            return
        yield victim, short
        short -= kv.footprint(victim)


def _newest_last(candidates: Sequence[Request]) -> Iterator[Request]:
    """Yield requests whose KV was swapped in, and would leave before they compute a token, after all others."""
    newest = []
    for candidate in candidates:
        if candidate.progress.is_newly_resident:
            newest.append(candidate)
        else:
            yield candidate
    yield from newest


class Recompute:
    """Drops the KV of the lowest-ranked requests, which recompute it later (FastServe section 4.2, strawman 2)."""

    is_decode_invariant = True
    shares = False
    how = Preemption.DROP

    def returns_overlapped(self, request: Request) -> bool:
        return False

    def returns_alongside(self, request: Request) -> bool:
        return False

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        return [Eviction(victim, self.how) for victim, _ in _until_enough(short, candidates, kv)]

    def on_dropped(self, tokens: int, now: float) -> None:
        pass

    def ahead(
        self, still: Sequence[Request], ordering: Ordering, kv: KVAccounts, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        return (), ()


class Defer(Recompute):
    """Never evicts for new requests, whatever their rank; only growth evicts (FastServe section 4.2, strawman 1)."""

    is_decode_invariant = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        return super().victims(short, candidates, kv, now, incoming) if incoming is None else ()


class KeepKv(Recompute):
    """Swaps the lowest-ranked requests with blocking transfers, and drops KV only when the CPU tier is full."""

    how = Preemption.SWAP


class Swap(Recompute):
    """Reactive swapping (FastServe section 4.2): swaps the lowest-ranked requests out and in with blocking transfers.

    KV is dropped if its prefill is unfinished, the CPU tier is full, or recomputation is faster than swapping.

    Args:
        drop_share: Maximum share of time for recomputation after drops for new requests, except for those of a better
            band than their victim, and those that must precede a candidate.
        exempts_first: Whether real-time requests without output are exempt, too, because their ordering limits that
            time.
    """

    is_decode_invariant = True
    displaces = False

    def __init__(self, cost: CostModel, *, drop_share: float = DROP_SHARE, exempts_first: bool = False) -> None:
        if not drop_share > 0:
            raise ValueError(f"drop_share must be above 0, got {drop_share}")
        self._cost = cost
        self._drop_share = drop_share
        self._exempts_first = exempts_first
        self._next_drop = -math.inf  # earliest time of the next drop for a new request
        self._ordering: Ordering | None = None

    def bind(self, ordering: Ordering) -> None:
        self._ordering = ordering

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        found = []
        room = kv.tiers.cpu_free if kv.tiers is not None else 0
        is_free = incoming is None or now >= self._next_drop or self._is_exempt(incoming, candidates)
        for victim, missing in _until_enough(short, _newest_last(candidates), kv):
            part = self.part(victim, missing, kv)
            filled, keep = kv.filled(victim), 0 if part is None else kv.filled_after(victim, part)
            if (filled == keep > 0) or (filled - keep <= room and self.is_worth_moving(victim, kv, keep)):
                room -= filled - keep
                found.append(Eviction(victim, Preemption.SWAP if part is None else Preemption.SPILL, part))
            elif is_free or (incoming is not None and incoming.progress.band < victim.progress.band):
                displaces = self.displaces and part is None and self.is_worth_moving(victim, kv)
                found.append(
                    Eviction(victim, Preemption.SWAP if displaces else Preemption.DROP, part, displaces=displaces)
                )
            else:
                return ()
        return found

    def _is_exempt(self, incoming: Request, candidates: Sequence[Request]) -> bool:
        is_first = self._exempts_first and not (incoming.progress.output or incoming.progress.band[0])
        return is_first or must_precede(self._ordering, incoming, candidates)

    def part(self, victim: Request, missing: int, kv: KVAccounts) -> int | None:
        return None

    def on_dropped(self, tokens: int, now: float) -> None:
        seconds = self._cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))
        self._next_drop = max(now, self._next_drop) + seconds / self._drop_share

    def is_worth_moving(self, request: Request, kv: KVAccounts, keep: int = 0) -> bool:
        return request.progress.known - request.progress.computed <= 1 and self._moves_faster(request, kv, keep)

    def _moves_faster(self, request: Request, kv: KVAccounts, keep: int) -> bool:
        # Recomputation shares its step with other requests, so the fixed time of a step is not part of its price.
        price = self._again_s(request, kv, keep) - self._cost.step(StepShape())
        return self._both_moves_s(request, kv, keep) <= price

    def _again_s(self, request: Request, kv: KVAccounts, keep: int = 0) -> float:
        tokens = kv.lost(request, keep)
        kept = request.progress.computed - tokens
        return self._cost.step(StepShape(prefill=tokens, attention=tokens * kept + tokens * (tokens + 1) // 2))

    def _both_moves_s(self, request: Request, kv: KVAccounts, keep: int = 0) -> float:
        return 2 * self._cost.transfer(kv.filled(request) - keep + kv.state_blocks)


class Vacate(Swap):
    """Evicts only when a parent request needs its reserved blocks (EconoServe section 3.2) or when nothing can run.

    Requests with nested reservations are evicted first.
    """

    is_decode_invariant = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        if (reservations := kv.reservations) is not None:
            candidates = sorted(
                candidates, key=lambda candidate: not isinstance(reservations.parent_of(candidate), Request)
            )
        return super().victims(short, candidates, kv, now, incoming)


class Spill(Swap):
    """Swaps out only the missing number of blocks, the last ones of best-effort requests (BROS section 5.2).

    Requests with KV on the CPU tier come first, because they wait already, until all of their KV is on the device
    again. Real-time requests are evicted last, and as a whole.
    """

    is_decode_invariant = True

    def returns_alongside(self, request: Request) -> bool:
        return request.is_best_effort

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        def place(victim: Request) -> tuple[bool, bool]:
            held = kv.blocks_of(victim)
            return not victim.is_best_effort, held is None or not held.swapped_out

        return super().victims(short, sorted(candidates, key=place), kv, now, incoming)

    def is_worth_moving(self, request: Request, kv: KVAccounts, keep: int = 0) -> bool:
        return self._moves_faster(request, kv, keep)

    def part(self, victim: Request, missing: int, kv: KVAccounts) -> int | None:
        return missing if victim.is_best_effort and missing < kv.footprint(victim) else None


class Share(Spill):
    """`Spill` with bidirectional block sharing (BROS section 5).

    A real-time request fills blocks of best-effort requests from the other end, emptiest blocks first.
    """

    is_decode_invariant = True
    shares = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVAccounts, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        # Real-time requests share no blocks and keep their order, least urgent first.
        emptiest = sorted(
            candidates,
            key=lambda candidate: candidate.is_best_effort and -(-candidate.progress.computed % kv.block_size),
        )
        found = super().victims(short, emptiest, kv, now, incoming)
        return [
            victim._replace(shared=victim.request.progress.reverse and victim.how is not Preemption.DROP)
            for victim in found
        ]
