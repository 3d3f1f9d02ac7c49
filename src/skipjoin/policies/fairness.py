"""Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from math import inf
from operator import attrgetter
from typing import Any

from skipjoin.core.context import StepContext
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import BatchBuilder, BatcherWrapper, CostModel, Fact, Ordering
from skipjoin.core.policy_set import is_decode_invariant
from skipjoin.core.promises import must_precede
from skipjoin.core.refusals import ALL_TOO_LONG, INCOMING_TOO_LONG, TOO_LONG, Refusal
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.best_effort import LimitedBestEffort, is_under_way
from skipjoin.policies.routed import Routed
from skipjoin.policies.step_load import StepLoad, fitting_tokens

# Weight of a generated token relative to a prompt token, as in the paper's experiments.
OUTPUT_WEIGHT = 2.0


@dataclass(slots=True, eq=False)
class _Client:
    """Client with unfinished requests."""

    number: int  # decreases with each arriving client, so that the latest is first among equal counters
    ordering: Ordering
    served: float
    live: dict[Request, int] = field(default_factory=dict)
    weight: float = 1.0  # of its latest request
    distance: int = 0  # whole leads ahead of the client with the least service
    is_apart: bool = True  # no other client has its distance

    @property
    def key(self) -> tuple[float, int]:
        return self.served, self.number


_BY_KEY = attrgetter("key")


class Fair(Routed):
    """Ordering of clients by least service received, with a separate ordering of each client's requests.

    Service counts computed prompt tokens, and output tokens and charges times `output_weight`, all over the client's
    weight. A returning client is lifted to the smallest counter of the active clients. Only clients that are behind by
    a `lead` (in weighted tokens) or more preempt, so that two clients do not preempt each other in turn.
    """

    def __init__(self, make: Callable[[], Ordering], *, lead: float, output_weight: float) -> None:
        self._make = make
        self._lead, self._output_weight = lead, output_weight
        self._clients: dict[str, _Client] = {}
        self._left: dict[str, float] = {}  # counters of inactive clients that exceed the smallest active one
        self._numbers = count(0, -1)
        self._sorted: list[_Client] = []  # by key, valid while `_is_sorted`
        self._is_sorted = True

    def inner(self, request: Request) -> Ordering:
        return self._of(request).ordering

    def inners(self) -> Iterable[Ordering]:
        return (client.ordering for client in self._standings())

    def served(self, client: str) -> float:
        """Return the client's virtual counter; only differences between counters matter."""
        if (found := self._clients.get(client)) is not None:
            return found.served
        return max(self._left.get(client, 0.0), self._least())

    def on_arrived(self, request: Request, now: float) -> None:
        name = request.options.client
        if name not in self._clients:
            served = self.served(name)
            self._left.pop(name, None)
            self._clients[name] = _Client(next(self._numbers), self._make(), served)
            self._is_sorted = False
        client = self._clients[name]
        client.weight = request.options.weight
        client.live[request] = min(request.progress.computed, len(request.prompt))
        super().on_arrived(request, now)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        for slice_ in slices:
            client = self._of(slice_.request)
            client.served += self._service(client, slice_) / client.weight
        super().on_scheduled(slices, now)
        self._is_sorted = False

    def on_charged(self, request: Request, tokens: float, now: float) -> None:
        name, service = request.options.client, tokens * self._output_weight / request.options.weight
        if (client := self._clients.get(name)) is not None:
            client.served += service
            self._is_sorted = False
        elif self._clients:
            self._left[name] = self.served(name) + service

    def on_finished(self, request: Request, now: float) -> None:
        client = self._of(request)
        super().on_finished(request, now)
        del client.live[request]
        if not client.live:
            self._forget(request.options.client)

    def rank(self, request: Request) -> Any:
        client = self._of(request)
        return client.key, client.ordering.rank(request)

    def outranks(self, one: Request, other: Request) -> bool:
        self._standings()
        mine, theirs = self._of(one), self._of(other)
        if mine is theirs:
            return mine.is_apart and mine.ordering.outranks(one, other)
        return mine.distance < theirs.distance

    def may_pass(self, request: Request, kv: KVAccounts) -> bool:
        # A request is passed by its own client's only. Otherwise another client's would take the KV that it waits for,
        # and run whatever the counters are.
        mine = self._of(request)
        before = takewhile(lambda client: client is not mine, self._standings())
        waiting = (other for client in before for other in client.live if kv.blocks_of(other) is None)
        return all(other.progress.awaits_grammar for other in waiting) and super().may_pass(request, kv)

    def must_precede(self, request: Request, others: Iterable[Request]) -> bool:
        self._standings()
        mine, same = self._of(request), list[Request]()
        for other in others:
            theirs = self._of(other)
            if mine.distance < theirs.distance:
                return True
            if mine is theirs:
                same.append(other)
        return mine.is_apart and must_precede(mine.ordering, request, same)

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        self._standings()
        by_client: dict[_Client, list[Request]] = {}
        for request in requests:
            by_client.setdefault(self._of(request), []).append(request)
        turns = [
            ((client.distance, turn), client.number, place, request)
            for client, theirs in by_client.items()
            for place, (turn, request) in enumerate(client.ordering.expected_order(theirs, now))
        ]
        return [(turn, request) for turn, _, _, request in sorted(turns)]

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        standings, client = self._standings(), self._of(request)
        meaning = "Clients that received less service. Their requests run first."
        yield Fact("clients before it", standings.index(client), "clients", meaning)
        # Not to the token, from which clients could tell the lengths of each other's requests.
        ahead = round((client.served - standings[0].served) / self._lead, 1)
        meaning = "How far its client is ahead of the first one. From 1 on, requests of that one may evict its KV."
        yield Fact("lead", ahead, "KV pools", meaning)
        yield from super().explain(request, now, kv)

    def _of(self, request: Request) -> _Client:
        return self._clients[request.options.client]

    def _least(self) -> float:
        return min((client.served for client in self._clients.values()), default=0.0)

    def _standings(self) -> list[_Client]:
        if not self._is_sorted:
            self._is_sorted = True
            self._sorted = sorted(self._clients.values(), key=_BY_KEY)
            before: _Client | None = None
            for client in self._sorted:
                client.distance = int((client.served - self._sorted[0].served) / self._lead)
                client.is_apart = before is None or before.distance < client.distance
                if before is not None and not client.is_apart:
                    before.is_apart = False
                before = client
        return self._sorted

    def _service(self, client: _Client, slice_: Slice) -> float:
        request = slice_.request
        counted = client.live[request]
        end = min(slice_.start + slice_.tokens, len(request.prompt))
        client.live[request] = max(counted, end)
        return max(0, end - counted) + (self._output_weight if slice_.samples else 0.0)

    def _forget(self, name: str) -> None:
        self._left[name] = self._clients.pop(name).served
        least = self._least() if self._clients else inf
        self._left = {client: served for client, served in self._left.items() if served > least}
        self._is_sorted = False


class FairSteps(BatcherWrapper):
    """Bounds how long clients make each other's steps, around `LimitedBestEffort`.

    While n > 1 clients have real-time requests, a step takes at most n times the modeled time of its first client's
    requests alone.
    """

    def __init__(self, batcher: LimitedBestEffort) -> None:
        super().__init__(batcher)
        self.cost = batcher.patience.cost
        self._clients: Counter[str] = Counter()

    @property
    def is_decode_invariant(self) -> bool:
        return len(self._clients) < 2 and is_decode_invariant(self.batcher)

    def on_arrived(self, request: Request, now: float) -> None:
        if not request.is_best_effort:
            self._clients[request.options.client] += 1

    def on_finished(self, request: Request, now: float) -> None:
        if not request.is_best_effort:
            client = request.options.client
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    def open(self, context: StepContext) -> BatchBuilder:
        inner = self.batcher.open(context)
        clients = len(self._clients)
        return inner if clients < 2 else FairBuilder(inner, context, self.cost, clients)


class FairBuilder:
    __slots__ = ("_clients", "_context", "_cost", "_first", "_inner", "_limit_s", "_load")

    def __init__(self, inner: BatchBuilder, context: StepContext, cost: CostModel, clients: int) -> None:
        self._inner, self._context = inner, context
        self._cost, self._clients = cost, clients
        self._load = StepLoad()
        self._first: str | None = None
        self._limit_s = inf  # set when a second client joins

    def offer(self, request: Request, pending: int) -> int | Refusal:
        verdict = self._inner.offer(request, pending)
        if isinstance(verdict, Refusal) or request.progress.band[0]:
            return verdict
        limit_s = self._limit_beside(request)
        if limit_s == inf:
            return verdict
        swapped_out = self._context.blocks_swapped_out(request)
        tokens = fitting_tokens(
            self._load, request.progress.planned, verdict, swapped_out=swapped_out, cost=self._cost, limit=limit_s
        )
        if tokens:
            return tokens
        if pending == 1 and not swapped_out:
            return ALL_TOO_LONG
        return TOO_LONG if is_under_way(request) else INCOMING_TOO_LONG

    def take(self, request: Request, tokens: int) -> None:
        if not request.progress.band[0]:
            self._limit_s = self._limit_beside(request)
            self._first = request.options.client if self._first is None else self._first
            self._load = self._load.plus(
                StepLoad.of(request.progress.planned, tokens, self._context.blocks_swapped_out(request))
            )
        self._inner.take(request, tokens)

    def _limit_beside(self, request: Request) -> float:
        if self._limit_s < inf or self._first in (None, request.options.client):
            return self._limit_s
        return self._clients * self._load.seconds(self._cost)
