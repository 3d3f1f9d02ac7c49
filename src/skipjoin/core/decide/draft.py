from __future__ import annotations

from dataclasses import dataclass, field

from skipjoin.core.events import Event
from skipjoin.core.policy import Allocation
from skipjoin.core.request import Request
from skipjoin.core.step import Move, Slice


@dataclass(eq=False, slots=True)
class Draft:
    """Step that is being decided: what a decision changes besides the ledger and requests.

    Policies are notified of `evicted`, `reserved` and `deferred` after the iteration over the ordering.
    """

    events: list[Event]  # those of the core, to which the decision adds its own
    led_since: dict[Request, float]  # since when requests without KV wait for another one to compute a shared prefix
    slices: list[Slice] = field(default_factory=list)
    blocking: list[Move] = field(default_factory=list)
    overlapped: list[Move] = field(default_factory=list)
    waiting_for_kv: list[Request] = field(default_factory=list)
    evicted: list[Request] = field(default_factory=list)
    reserved: list[tuple[Request, Allocation]] = field(default_factory=list)
    deferred: list[Request] = field(default_factory=list)
    pausing: set[Request] = field(default_factory=set)  # skip this step, so that a later one can evict them
