"""Baselines and ablations of EconoServe's evaluation (sections 2 and 4)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Ordering
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.core.selective import Limits
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.econo import PaddedLengths, Phase
from skipjoin.policies.eviction import KeepKv, Recompute, Swap
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.needs import NeedIndex
from skipjoin.policies.ordering import Fcfs
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.starvation import starvation_after
from skipjoin.policies.valued import Valued
from skipjoin.recipes import Forecasts, Params, Settings, recipe
from skipjoin.recipes.baselines import OracleParams
from skipjoin.recipes.econoserve import GroupParams, OrderParams, ReservationParams, by_objectives, decoupled
from skipjoin.recipes.parts import ForwardTokens, LengthRange, Padding, classed, greedy, staged, true_lengths

# `skipjoin serve --recipe` loads this file by its path.
sys.path.append(str(Path(__file__).parents[2]))
from papers.econoserve.coupled import ByArrival, ByGroup, Closest, HoldersFirst, Room, WholePrompts, WholeReservations
from papers.fastserve.static import WholeMaximum


@recipe
def fcfs_swap(s: Settings) -> Policies:
    """First come, first served as in vLLM with swapping: requests that lose KV swap it (EconoServe section 2.1)."""
    return classed(s, Fcfs, greedy(s, s.max_tokens, chunked=False), OnDemand(), KeepKv())


@recipe(forecasts=Forecasts.TRUE)
def srtf(s: Settings, p: OracleParams) -> Policies:
    """Shortest remaining time first with true lengths and maximum allocation (EconoServe section 2.1)."""
    lengths = true_lengths("srtf", s, p.oracle)
    return _reserving_all(s, lambda: Valued(RemainingTime(ExecutionTime(s.cost), lengths)))


@recipe
def fastserve_max(s: Settings) -> Policies:
    """FastServe's feedback queues, five of them, with maximum allocation (EconoServe section 2.1)."""
    return _reserving_all(s, lambda: SkipJoinMlfq(s.cost, levels=5, starvation_s=starvation_after(s.cost, s.slo_s)))


def _reserving_all(s: Settings, ordering: Callable[[], Ordering]) -> Policies:
    """Return policies that reserve KV for prompt and max_tokens at admission, which are never evicted for others."""
    return classed(s, ordering, greedy(s, s.max_tokens, chunked=True), WholeMaximum(), Recompute())


class _LargestNested(NeedIndex):
    """Index that first offers the largest prompts that a parent request can hold."""

    def fitting(self, limits: Limits, kv: KVAccounts) -> Iterator[Request]:
        self._place_new(kv)
        nested: set[Request] = set()
        while (request := self._largest(limits(), nested)) is not None:
            nested.add(request)
            yield request
        for request in super().fitting(limits, kv):
            if request not in nested:
                yield request

    def _largest(self, limits: Sequence[int], seen: set[Request]) -> Request | None:
        # The last need is that in a parent request.
        queues = self._kinds[-1].up_to(limits[-1]) if self._kinds else []
        return next((one for queue in reversed(queues) for _, one in queue if one not in seen), None)


@recipe(forecasts=Forecasts.LEARNED)
def econoserve_largest(s: Settings, p: OrderParams) -> Policies:
    """EconoServe that nests the largest request that fits, not the first in order (EconoServe section 3.2)."""
    return by_objectives(s, p, _LargestNested)


@recipe(forecasts=Forecasts.LEARNED)
def econoserve_sd(s: Settings, p: GroupParams) -> Policies:
    """EconoServe without nested reservations and its order: separate queues, groups (EconoServe section 4, -SD)."""
    lengths = PaddedLengths(p.padding)
    return decoupled(s, p, lengths, ByGroup(lengths, p.length_range), groups=True, gated=p.admission == "gated")


@recipe(forecasts=Forecasts.LEARNED)
def econoserve_d(s: Settings, p: ReservationParams) -> Policies:
    """EconoServe with separate queues and exact reservations only (EconoServe section 4, -D)."""
    return decoupled(s, p, PaddedLengths(p.padding), ByArrival(), groups=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeReservationParams(Params):
    """Reservation and step sizes (EconoServe sections 2.1 and 2.3)."""

    padding: Padding = 0.15
    forward_tokens: ForwardTokens = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGroupParams(WholeReservationParams):
    """Parameters of groups that start together."""

    length_range: LengthRange = 32


@recipe(forecasts=Forecasts.LEARNED)
def multires(s: Settings, p: WholeReservationParams) -> Policies:
    """MultiRes (EconoServe section 2.1): requests that best fill both compute and KV, with exact reservations.

    It is for simulations, as its planning time is quadratic in the queue length.
    """
    lengths, order, room = PaddedLengths(p.padding), ByArrival(), Room()
    batcher = WholePrompts(s.max_seqs, s.max_tokens, s.cost, target=p.forward_tokens, room=room)
    return classed(
        s,
        lambda: Closest(order, room, lengths),
        staged(s, batcher, batcher.target, cuts=False),
        WholeReservations(lengths, room=room),
        Swap(s.cost),
    )


@recipe(forecasts=Forecasts.LEARNED)
def synccoupled(s: Settings, p: WholeGroupParams) -> Policies:
    """SyncCoupled (EconoServe section 2.2): requests of similar length start together, with exact reservations."""

    def group(request: Request, now: float) -> tuple[object, ...]:
        return (request.progress.band, order.key(request, request.progress.known, Phase.WAITING, now))

    lengths = PaddedLengths(p.padding)
    order = ByGroup(lengths, p.length_range)
    batcher = WholePrompts(s.max_seqs, s.max_tokens, s.cost, target=p.forward_tokens)
    return classed(
        s,
        lambda: HoldersFirst(order),
        staged(s, batcher, batcher.target, cuts=False),
        WholeReservations(lengths, group=group),
        Swap(s.cost),
    )
