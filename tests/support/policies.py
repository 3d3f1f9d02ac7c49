"""Policies and cost models that only tests use."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from skipjoin.core.kv import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepShape
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.pressure import Swap

# A machine on which every term of the cost counts, and copies take a while.
COST = LinearCost(
    floor=0.02,
    prefill_token=1e-4,
    attention_pair=1e-7,
    decode=1e-4,
    context_token=1e-7,
    block=1e-3,
    transfer_floor=1e-3,
)


class UnitCost:
    """One second per token computed, whatever else happens: worked examples have whole numbers."""

    revision = 0

    def step(self, shape: StepShape) -> float:
        return shape.prefill + shape.decodes

    def transfer(self, blocks: int) -> float:
        return 0.0


class Ranks:
    """An ordering that the test sets: `rank` by request id, equals share a number and come in order of id.
    read: how many requests were taken from `ranked`, over all calls."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers
        self.read = 0
        self._live: list[Request] = []

    def arrived(self, request: Request, now: float) -> None:
        self._live.append(request)

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        pass

    def evicted(self, request: Request, now: float) -> None:
        pass

    def left(self, request: Request, now: float) -> None:
        self._live.remove(request)

    def ranked(self, now: float) -> Iterator[Request]:
        for request in sorted(self._live, key=self.rank):
            self.read += 1
            yield request

    def rank(self, request: Request) -> tuple[int, int]:
        return self.numbers[request.id], request.id

    def outranks(self, one: Request, other: Request) -> bool:
        return self.numbers[one.id] < self.numbers[other.id]


class Chaos(Swap):
    """Swaps at random: any idle holder may leave the device, or come back, beside any step."""

    def __init__(self, seed: int, rate: float = 0.3) -> None:
        self._draw = random.Random(seed)
        self._rate = rate

    def ahead(self, idle: Iterable[Request], kv: KVLedger, now: float) -> tuple[Sequence[Request], Sequence[Request]]:
        chosen = [request for request in idle if self._draw.random() < self._rate]
        out = [request for request in chosen if kv.can_move_out(request)]
        return out, [request for request in chosen if kv.can_move_in(request)]
