"""Pressures: what leaves the device when space is short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from skipjoin.core.events import Preemption
from skipjoin.core.kv import KVLedger
from skipjoin.core.request import Request


def _until_enough(short: int, candidates: Sequence[Request], kv: KVLedger) -> Iterator[Request]:
    for victim in candidates:
        if short <= 0:
            return
        short -= kv.footprint(victim)
        yield victim


class Recompute:
    """The least important make way, their KV is dropped, and they compute it again when they return."""

    def victims(self, short: int, candidates: Sequence[Request], kv: KVLedger) -> Iterator[tuple[Request, Preemption]]:
        return ((victim, Preemption.DROP) for victim in _until_enough(short, candidates, kv))

    def ahead(self, idle: Iterable[Request], kv: KVLedger, now: float) -> tuple[Sequence[Request], Sequence[Request]]:
        return (), ()


class Swap(Recompute):
    """The least important make way, their KV goes to the host, and comes back when they do. An unfinished prefill
    is dropped, not swapped; so is whatever the host has no room for."""

    def victims(self, short: int, candidates: Sequence[Request], kv: KVLedger) -> Iterator[tuple[Request, Preemption]]:
        for victim in _until_enough(short, candidates, kv):
            finished_prefill = victim.known - victim.computed <= 1
            yield victim, Preemption.SWAP if finished_prefill else Preemption.DROP
