"""Ablations of EconoServe (section 4), and its predecessors with exact reservations for whole requests (section 2)."""

from __future__ import annotations

from dataclasses import dataclass

from skipjoin.core.policy import Policies
from skipjoin.core.request import Request
from skipjoin.policies.coupled import Closest, HoldersFirst, Room, WholePrompts, WholeReservations
from skipjoin.policies.econo import ByArrival, ByGroup, PaddedLengths, Phase
from skipjoin.policies.eviction import Swap
from skipjoin.recipes import Forecasts, Params, Settings, recipe
from skipjoin.recipes.econoserve import GroupParams, ReservationParams, decoupled
from skipjoin.recipes.parts import ForwardTokens, LengthRange, Padding, classed, staged


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
        return (request.band, order.key(request, request.known, Phase.WAITING, now))

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
