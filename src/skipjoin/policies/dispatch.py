"""Dispatch rules: which replica takes a request. The simulator and the server share them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from skipjoin.core.events import Event, Finished, Token
from skipjoin.core.policy import CostModel
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import StepShape
from skipjoin.policies.predictors import LearntLength

# Work is compared between busy replicas: a token is priced as its share of a step of this many decodes, a prompt as
# what it adds to that step.
_TYPICAL_BATCH = 32
# A heap of replicas is made anew when it has so many entries for each, most of them outdated.
_MOST_ENTRIES = 4
# Requests that ended so have generated all that they were to generate.
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Dispatch(Protocol):
    """Chooses a replica for each request as it arrives. ignores_tokens: whether it need not be told of tokens."""

    ignores_tokens: bool

    def choose(self, request: Request) -> int:
        """The number of the replica that takes the request."""
        ...

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        """What happened on a replica."""


class RoundRobin:
    """One replica after the other, from 0."""

    ignores_tokens = True

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._next = 0

    def choose(self, request: Request) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self._replicas
        return chosen

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        pass


class _Prices:
    """What work costs on one replica, in seconds. cost: as its engine told it."""

    __slots__ = ("_batch_s", "_cost", "token_s")

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._batch_s = cost.step(StepShape(decodes=_TYPICAL_BATCH, context=_TYPICAL_BATCH))
        self.token_s = self._batch_s / _TYPICAL_BATCH

    def prefill_s(self, tokens: int) -> float:
        pairs = tokens * (tokens + 1) // 2
        return self._cost.step(StepShape(tokens, pairs, _TYPICAL_BATCH, _TYPICAL_BATCH)) - self._batch_s


class _Left:
    """What a request still has to do. prefill_s: seconds of its prompt, 0 once computed. tokens: that it is expected to
    generate, each of token_s seconds."""

    __slots__ = ("prefill_s", "replica", "token_s", "tokens")

    def __init__(self, replica: int, prefill_s: float, token_s: float, tokens: int) -> None:
        self.replica = replica
        self.prefill_s = prefill_s
        self.token_s = token_s
        self.tokens = tokens


class LeastWork:
    """The replica with the least estimated work left, in seconds: prompts to compute and tokens to generate; among
    equals the first. Replicas may come and go. A choice costs what has changed since the one before, not the number of
    replicas.

    lengths: how many tokens a request will have generated when it ends; asked again when a request has passed that.
    learn: told of every request that came to its own end.
    """

    ignores_tokens = False

    def __init__(
        self, lengths: Callable[[Request], int], *, learn: Callable[[Request], object] = lambda request: None
    ) -> None:
        self._lengths = lengths
        self._learn = learn
        self._prices: dict[int, _Prices] = {}
        self._work: dict[int, float] = {}
        self._left: dict[Request, _Left] = {}
        # A heap of (work, replica) with outdated entries, and the replicas whose present work may not be in it.
        self._least: list[tuple[float, int]] = []
        self._changed: set[int] = set()

    def join(self, replica: int, cost: CostModel) -> None:
        """A replica takes requests from now on; it has none yet. cost: prices its work."""
        self._prices[replica] = _Prices(cost)
        self._work[replica] = 0.0
        self._changed.add(replica)

    def leave(self, replica: int) -> None:
        """A replica takes no more requests, and has none any more."""
        del self._prices[replica], self._work[replica]
        self._changed.discard(replica)
        self._left = {request: left for request, left in self._left.items() if left.replica != replica}

    def work(self, replica: int) -> float:
        """Seconds of estimated work that a replica has left."""
        return self._work[replica]

    def choose(self, request: Request) -> int:
        chosen = self._idlest()
        prices, generated = self._prices[chosen], len(request.output)
        # Tokens that it brings along are computed with its prompt, unless it brings their KV, too.
        left = _Left(
            chosen,
            prices.prefill_s(request.known - request.reached),
            prices.token_s,
            max(1, self._lengths(request) - generated),
        )
        self._left[request] = left
        self._change(chosen, left.prefill_s + left.tokens * left.token_s)
        return chosen

    def generated(self, request: Request) -> None:
        """The request got a token; its `output` has it."""
        left = self._left[request]
        change = left.prefill_s + left.token_s
        left.prefill_s = 0.0
        left.tokens -= 1
        if left.tokens == 0:  # longer than predicted, unless it ends now
            left.tokens = max(1, self._lengths(request) - len(request.output))
            change -= left.tokens * left.token_s
        self._change(left.replica, -change)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """The request is over."""
        left = self._left.pop(request)
        self._change(left.replica, -(left.prefill_s + left.tokens * left.token_s))
        if reason in _OWN_ENDS:
            self._learn(request)

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.generated(event.request)
            elif isinstance(event, Finished):
                self.ended(event.request, event.reason)

    def _change(self, replica: int, seconds: float) -> None:
        self._work[replica] += seconds
        self._changed.add(replica)

    def _idlest(self) -> int:
        """The replica with the least work, among equals the first. There must be one."""
        least, work = self._least, self._work
        for replica in self._changed:
            heapq.heappush(least, (work[replica], replica))
        self._changed.clear()
        if len(least) > _MOST_ENTRIES * len(work):
            least[:] = [(seconds, replica) for replica, seconds in work.items()]
            heapq.heapify(least)
        while work.get(least[0][1]) != least[0][0]:
            heapq.heappop(least)
        return least[0][1]


DISPATCH_RULES = ("round-robin", "least-work", "least-work-oracle")


def make_dispatch(name: str, replicas: int, cost: CostModel, oracle: Callable[[Request], int]) -> Dispatch:
    """The rule called `name`, one of `DISPATCH_RULES`: `least-work` learns lengths from requests that ended, as the
    server does, and expects none above its max_tokens; `least-work-oracle` has them from the oracle. Raises ValueError
    for another name."""
    if name == "round-robin":
        return RoundRobin(replicas)
    if name not in DISPATCH_RULES:
        raise ValueError(f"dispatch must be one of {', '.join(DISPATCH_RULES)}, got {name!r}")
    rule = least_work() if name == "least-work" else LeastWork(oracle)
    for replica in range(replicas):
        rule.join(replica, cost)
    return rule


def least_work() -> LeastWork:
    """Least work by lengths that are learnt from the requests that ended."""
    lengths = LearntLength()
    return LeastWork(lengths.predict, learn=lengths.learn)
