"""Predecessors of EconoServe with exact reservations for whole requests (EconoServe section 2)."""

from __future__ import annotations

from dataclasses import dataclass

from skipjoin.core.policy import Policies
from skipjoin.core.request import Request
from skipjoin.policies.coupled import Closest, HoldersFirst, Room, WholeClaims, WholePrompts
from skipjoin.policies.econo import ByArrival, ByGroup, PaddedLengths, Phase
from skipjoin.policies.eviction import Swap
from skipjoin.recipes.parts import ForwardTokens, LengthRange, Padding, classed, staged
from skipjoin.recipes.registry import Forecasts, Params, Settings, recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeClaimParams(Params):
    """Reservation and step sizes (EconoServe sections 2.1 and 2.3)."""

    padding: Padding = 0.15
    forward_tokens: ForwardTokens = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGroupParams(WholeClaimParams):
    """Parameters of groups that start together."""

    length_range: LengthRange = 32


@recipe(forecasts=Forecasts.LEARNT)
def multires(s: Settings, p: WholeClaimParams) -> Policies:
    """MultiRes (EconoServe section 2.1): requests that best fill both compute and KV, with exact reservations.

    It is for simulations, as its planning time is quadratic in the queue length.
    """
    lengths, order, room = PaddedLengths(p.padding), ByArrival(), Room()
    batcher = WholePrompts(s.max_seqs, s.max_tokens, s.cost, target=p.forward_tokens, room=room)
    return classed(
        s,
        lambda: Closest(order, room, lengths),
        staged(s, batcher, batcher.target, cuts=False),
        WholeClaims(lengths, room=room),
        Swap(s.cost),
    )


@recipe(forecasts=Forecasts.LEARNT)
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
        WholeClaims(lengths, group=group),
        Swap(s.cost),
    )
