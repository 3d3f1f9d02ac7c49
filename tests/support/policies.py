"""Policies and cost models that only tests use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from skipjoin.core.events import Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Allocation, Callbacks, Deferral, Eviction, EvictionPolicy, Ordering, Refusal
from skipjoin.core.request import Request
from skipjoin.core.scheduling.context import StepContext
from skipjoin.core.step import StepShape
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Defer, ProactiveSwap, Recompute, Spill, Swap
from support.recipes import RECIPES

# A machine on which every term of the cost counts. Moving any KV takes less than to compute it again, and long enough
# to be done ahead of need.
COST = LinearCost(
    floor=0.02,
    prefill_token=5e-4,
    attention_pair=1e-7,
    decode=1e-4,
    context_token=1e-7,
    block=5e-4,
    transfer_floor=5e-4,
)


class UnitCost:
    """One second per token computed, whatever else happens: worked examples have whole numbers."""

    revision = 0

    def step(self, shape: StepShape) -> float:
        return shape.prefill + shape.decodes

    def transfer(self, blocks: int) -> float:
        return 0.0


class Ranks(Callbacks):
    """An ordering that the test sets: `rank` by request id, equals share a number and come in order of id.
    read: how many requests were taken from `ranked`, over all calls."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers
        self.read = 0
        self._live: list[Request] = []

    def on_arrived(self, request: Request, now: float) -> None:
        self._live.append(request)

    def on_finished(self, request: Request, now: float) -> None:
        self._live.remove(request)

    def ranked(self, now: float) -> Iterator[Request]:
        for request in sorted(self._live, key=self.rank):
            self.read += 1
            yield request

    def rank(self, request: Request) -> tuple[int, int]:
        return self.numbers[request.id], request.id

    def outranks(self, one: Request, other: Request) -> bool:
        return self.numbers[one.id] < self.numbers[other.id]

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.numbers[request.id], request) for request in sorted(requests, key=self.rank)]


class Verdicts:
    """A batcher that answers by request id, and takes all tokens of those not named."""

    cap = 256

    def __init__(self, verdicts: dict[int, int | Refusal]) -> None:
        self.verdicts = verdicts

    def open(self, context: StepContext) -> Verdicts:
        return self

    def offer(self, request: Request, pending: int) -> int | Refusal:
        return self.verdicts.get(request.id, pending)

    def take(self, request: Request, tokens: int) -> None:
        pass


# A claim as a test asks for it, of a request that is to have so many tokens.
Answer = Callable[[Request, int, KVLedger], Allocation | Deferral]


def whole(request: Request, target: int, kv: KVLedger) -> Allocation:
    """All that the request may ever need, of what is free for all."""
    blocks = kv.blocks_for(request.max_total_tokens)
    return Allocation(now=blocks, blocks=blocks)


class Scripted(Callbacks):
    """An admission policy that answers by request id, and grants all others what they may ever need.

    answers: they may change at any time. keeps: blocks that accounts are to have. asked: every question, as the
    request's id and its target.
    """

    def __init__(self, answers: dict[int, Answer], keeps: dict[Account, int] | None = None) -> None:
        self.answers = answers
        self.asked: list[tuple[int, int]] = []
        self._keeps = keeps or {}

    def on_begin(self, now: float, kv: KVLedger) -> Iterable[tuple[Account, int]]:
        return self._keeps.items()

    def reserve(self, request: Request, target: int, kv: KVLedger) -> Allocation | Deferral:
        self.asked.append((request.id, target))
        return self.answers.get(request.id, whole)(request, target, kv)


class SwapAll(Recompute):
    """Who makes way goes to the host, in the middle of a prompt too, whatever that costs."""

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        return [Eviction(one.request, Preemption.SWAP) for one in super().victims(short, candidates, kv, now, newcomer)]


class SpillAll(Recompute):
    """Of what makes way, only as many blocks as are short go to the host."""

    how = Preemption.SPILL

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        found = []
        for one in super().victims(short, candidates, kv, now, newcomer):
            found.append(Eviction(one.request, self.how, short))
            short -= kv.footprint(one.request)
        return found


class LendAll(SpillAll):
    """Best-effort requests lend as many blocks as are short."""

    lends = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        return [one._replace(lent=True) for one in super().victims(short, candidates, kv, now, newcomer)]


class DropTails(SpillAll):
    """Of what makes way, only as many blocks as are short are dropped."""

    how = Preemption.DROP


class SpillAny(Spill):
    """Takes parts of requests of either class."""

    def part(self, victim: Request, missing: int, kv: KVLedger) -> int | None:
        return missing if missing < kv.footprint(victim) else None


class OnCall(SwapAll):
    """Moves beside a step what the test asks for, once."""

    def __init__(self) -> None:
        self.out: list[Request] = []
        self.back: list[Request] = []

    def ahead(
        self, still: Sequence[Request], ordering: Ordering, kv: KVLedger, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        out, self.out = self.out, []
        back, self.back = self.back, []
        return out, back


class Chaos(Swap):
    """Swaps at random: any holder may leave the device, or come back, beside any step."""

    def __init__(self, seed: int, rate: float = 0.3) -> None:
        super().__init__(COST)
        self._draw = random.Random(seed)
        self._rate = rate

    def ahead(
        self, still: Sequence[Request], ordering: Ordering, kv: KVLedger, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        chosen = [request for request in still if self._draw.random() < self._rate]
        out = [request for request in chosen if not kv.cpu_footprint(request)]
        return out, [request for request in chosen if kv.cpu_footprint(request)]


class Patchwork(Chaos):
    """Takes parts at random where blocks are short, to drop or to move them, and swaps at random too."""

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, newcomer: Request | None
    ) -> Sequence[Eviction]:
        found, missing = [], short
        for victim in candidates:
            if missing > 0:
                blocks = min(kv.footprint(victim), self._draw.randint(1, missing))
                found.append(Eviction(victim, self._draw.choice([Preemption.SPILL, Preemption.DROP]), blocks))
                missing -= blocks
        return found if missing <= 0 else super().victims(short, candidates, kv, now, newcomer)


# The recipes that differ in more than their pressure.
SYSTEMS = sorted(name for name in RECIPES if not name.startswith(("fastserve-", "alise-")))
# What one class does for all: batches, prompts in chunks, promotions, ranks that change at every step, and claims that
# are renewed.
SOME_SYSTEMS = ("static", "sarathi", "fastserve", "srpt", "econoserve")
# Every pressure there is, each run with one of its own.
EVICTIONS: dict[str, Callable[[], EvictionPolicy]] = {
    "recompute": Recompute,
    "defer": Defer,
    "swap": lambda: Swap(COST),
    "spill": lambda: SpillAny(COST),
    "proactive": lambda: ProactiveSwap(COST),
    "chaos": lambda: Chaos(1),
}
