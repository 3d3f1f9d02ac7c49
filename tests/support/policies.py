"""Policies and cost models that only tests use."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from skipjoin.core.context import StepContext
from skipjoin.core.events import Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Allocation, Callbacks, Deferral, Eviction, EvictionPolicy, Ordering
from skipjoin.core.policy_set import explanation
from skipjoin.core.refusals import Refusal
from skipjoin.core.request import Request
from skipjoin.core.selective import Limits
from skipjoin.core.step import StepShape
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Defer, Recompute, Spill, Swap
from skipjoin.policies.proactive_swap import ProactiveSwap
from support.recipes import RECIPES

# On this machine every term of the cost counts. Moving KV takes less time than recomputing it, but long enough to be
# worth doing ahead of need.
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
    """A cost of one second per computed token, so that worked examples have whole numbers."""

    revision = 0
    margin = 1.0

    def step(self, shape: StepShape) -> float:
        return shape.prefill + shape.decodes

    def transfer(self, blocks: int) -> float:
        return 0.0


def told_by(policy: object, request: Request, now: float = 0.0, kv: KVLedger | None = None) -> dict[str, float | str]:
    facts = explanation(policy, request, now, KVLedger(100, 0, 4) if kv is None else kv)
    assert len({fact.label for fact in facts}) == len(facts)
    return {fact.label: fact.value for fact in facts}


class Ranks(Callbacks):
    """An ordering by numbers that a test sets; requests with equal numbers rank equal, in order of id."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers
        self.read = 0
        self.found: Container[int] = ()
        self._live: list[Request] = []

    def on_arrived(self, request: Request, now: float) -> None:
        self._live.append(request)

    def on_finished(self, request: Request, now: float) -> None:
        self._live.remove(request)

    def ranked(self, now: float) -> Iterator[Request]:
        for request in sorted(self._live, key=self.rank):
            self.read += 1
            yield request

    def fitting(self, limits: Limits, kv: KVLedger) -> Iterator[Request]:
        return (request for request in sorted(self._live, key=self.rank) if request.id in self.found)

    def rank(self, request: Request) -> tuple[int, int]:
        return self.numbers[request.id], request.id

    def outranks(self, one: Request, other: Request) -> bool:
        return self.numbers[one.id] < self.numbers[other.id]

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.numbers[request.id], request) for request in sorted(requests, key=self.rank)]


class Verdicts:
    """A batcher that answers by request id, and accepts all tokens of requests without a verdict."""

    cap = 256

    def __init__(self, verdicts: dict[int, int | Refusal]) -> None:
        self.verdicts = verdicts

    def open(self, context: StepContext) -> Verdicts:
        return self

    def offer(self, request: Request, pending: int) -> int | Refusal:
        return self.verdicts.get(request.id, pending)

    def take(self, request: Request, tokens: int) -> None:
        pass


# Answers an admission question for a request that is to have a number of tokens.
Answer = Callable[[Request, int, KVLedger], Allocation | Deferral]


def whole(request: Request, target: int, kv: KVLedger) -> Allocation:
    """Allocation all blocks that the request may ever need, from the pool."""
    blocks = kv.blocks_for(request.max_total_tokens)
    return Allocation(now=blocks, blocks=blocks)


class Scripted(Callbacks):
    """An admission policy that answers by request id, and grants other requests all that they may ever need."""

    def __init__(self, answers: dict[int, Answer], keeps: dict[Account, int] | None = None) -> None:
        self.answers = answers
        self.asked: list[tuple[int, int]] = []
        self._keeps = keeps or {}

    def on_begin(self, now: float, kv: KVLedger) -> Iterable[tuple[Account, int]]:
        return self._keeps.items()

    def limits(self, kv: KVLedger) -> Sequence[int]:
        return ()

    def reserve(self, request: Request, target: int, kv: KVLedger) -> Allocation | Deferral:
        self.asked.append((request.id, target))
        return self.answers.get(request.id, whole)(request, target, kv)


class SwapAll(Recompute):
    """Swaps out every victim, even in the middle of its prompt and at any cost."""

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        return [
            Eviction(victim.request, Preemption.SWAP)
            for victim in super().victims(short, candidates, kv, now, incoming)
        ]


class SpillAll(Recompute):
    """Swaps out only the missing blocks of victims."""

    how = Preemption.SPILL

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        found = []
        for victim in super().victims(short, candidates, kv, now, incoming):
            found.append(Eviction(victim.request, self.how, short))
            short -= kv.footprint(victim.request)
        return found


class ShareAll(SpillAll):
    """Shares the missing blocks of best-effort requests."""

    shares = True

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        return [victim._replace(shared=True) for victim in super().victims(short, candidates, kv, now, incoming)]


class LendAlongside(ShareAll):
    """Swaps best-effort requests in while others compute."""

    def returns_alongside(self, request: Request) -> bool:
        return request.is_best_effort


class DropTails(SpillAll):
    how = Preemption.DROP


class SpillAny(Spill):
    """Swaps out parts of requests of either class."""

    def part(self, victim: Request, missing: int, kv: KVLedger) -> int | None:
        return missing if missing < kv.footprint(victim) else None


class OnCall(SwapAll):
    """Swaps out and in, during the next step, the requests that a test sets."""

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
    """Swaps random holders out and in during steps."""

    def __init__(self, seed: int, rate: float = 0.3) -> None:
        super().__init__(COST)
        self._draw = random.Random(seed)
        self._rate = rate

    def ahead(
        self, still: Sequence[Request], ordering: Ordering, kv: KVLedger, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        chosen = [request for request in still if self._draw.random() < self._rate]
        out = [request for request in chosen if not kv.tiers.cpu_footprint(request)]
        return out, [request for request in chosen if kv.tiers.cpu_footprint(request)]


class Patchwork(Chaos):
    """Drops or swaps out random parts where blocks are short, and swaps random holders during steps."""

    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        found, missing = [], short
        for victim in candidates:
            if missing > 0:
                blocks = min(kv.footprint(victim), self._draw.randint(1, missing))
                found.append(Eviction(victim, self._draw.choice([Preemption.SPILL, Preemption.DROP]), blocks))
                missing -= blocks
        return found if missing <= 0 else super().victims(short, candidates, kv, now, incoming)


# Recipes that differ in more than their eviction policy.
SYSTEMS = sorted(name for name in RECIPES if not name.startswith(("fastserve-", "alise-", "bros-", "fcfs-")))
# These cover batches, chunked prompts, promotions, ranks that change at every step, and renewed reservations.
SOME_SYSTEMS = ("static", "sarathi", "fastserve", "srpt", "econoserve")
# All eviction policies, which replace those of recipes.
EVICTIONS: dict[str, Callable[[], EvictionPolicy]] = {
    "recompute": Recompute,
    "defer": Defer,
    "swap": lambda: Swap(COST),
    "spill": lambda: SpillAny(COST),
    "proactive": lambda: ProactiveSwap(COST),
    "chaos": lambda: Chaos(1),
}
