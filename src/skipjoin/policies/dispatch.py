"""Dispatch rules: which replica takes a request. The simulator and the server share them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from skipjoin.core.events import Admitted, Event, Finished, Token
from skipjoin.core.kv.block_pool import Key
from skipjoin.core.policy import CostModel
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import StepShape
from skipjoin.policies.held_prefixes import HeldPrefixes
from skipjoin.policies.predictors import LearntLength

# Work is compared between busy replicas: a token is priced as its share of a step of this many decodes, a prompt as
# what it adds to that step.
_TYPICAL_BATCH = 32
# A heap of replicas is made anew when it has so many entries for each, most of them outdated.
_MOST_ENTRIES = 4
# What a second of computing that a prefix saves counts for, against a second of work, where hardly any other request
# uses it: what waits on a replica passes, and the next turn of a conversation finds the prefix there again.
OWN_WEIGHT = 8.0
# Most keys of a prompt that are looked up, so that a choice takes a few milliseconds at most.
MOST_KEYS = 2048
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

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Of so many tokens of a prompt, behind `context` tokens that have KV."""
        pairs = tokens * context + tokens * (tokens + 1) // 2
        return self._cost.step(StepShape(tokens, pairs, _TYPICAL_BATCH, _TYPICAL_BATCH)) - self._batch_s


class _Left:
    """What a request still has to do. prefill_s: seconds of its prompt, 0 once computed. tokens: that it is expected to
    generate, each of token_s seconds. has_token: whether it got one here. keys: how many it had when it
    came."""

    __slots__ = ("has_token", "keys", "prefill_s", "replica", "token_s", "tokens")

    def __init__(self, replica: int, prefill_s: float, token_s: float, tokens: int) -> None:
        self.has_token = False
        self.keys = 0
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
        self._assign(request, chosen, self._prefill_s(request, chosen))
        return chosen

    def _assign(self, request: Request, chosen: int, prefill_s: float) -> _Left:
        """Give a replica the work of a request. prefill_s: of its prompt."""
        tokens = max(1, self._lengths(request) - len(request.output))
        left = self._left[request] = _Left(chosen, prefill_s, self._prices[chosen].token_s, tokens)
        self._change(chosen, prefill_s + tokens * left.token_s)
        return left

    def _prefill_s(self, request: Request, replica: int, cached: int = 0) -> float:
        """Seconds of the prompt that a replica has to compute, of which it holds the KV of the first `cached` tokens.
        Tokens that the request brings along are computed with its prompt, unless it brings their KV, too."""
        reached = max(cached, request.reached)
        return self._prices[replica].prefill_s(len(request.prompt) + len(request.output) - reached, reached)

    def generated(self, request: Request) -> None:
        """The request got a token; its `output` has it."""
        left = self._left[request]
        change = left.prefill_s + left.token_s
        left.prefill_s = 0.0
        left.has_token = True
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


class PrefixAware(LeastWork):
    """The replica with the least estimated work left, less what the prefixes that it holds save of the request's own;
    among equals the one that holds most, then the first. Without a prefix it is the one with the least work.

    What is saved counts once where several requests that are not over use the prefix: another replica that computes
    it has it for all that come there. A prefix of its own counts `OWN_WEIGHT` times. So the work of the chosen replica
    is above the least by at most `OWN_WEIGHT` times the seconds that the request's prompt takes, and where prefixes are
    shared, as a system prompt is, above it by no more than those seconds.
    """

    def __init__(
        self, lengths: Callable[[Request], int], *, learn: Callable[[Request], object] = lambda request: None
    ) -> None:
        super().__init__(lengths, learn=learn)
        self._held = HeldPrefixes()
        self._block_size = 1

    def join(self, replica: int, cost: CostModel, blocks: int = 0, block_size: int = 1) -> None:
        """As in `LeastWork`. blocks: of KV that the replica has, which hold block_size tokens each, as those of all
        replicas do."""
        super().join(replica, cost)
        self._held.join(replica, blocks)
        self._block_size = block_size

    def leave(self, replica: int) -> None:
        super().leave(replica)
        self._held.leave(replica)

    def choose(self, request: Request) -> int:
        if not (keys := self._keys(request, 1)):
            return super().choose(request)
        found = self._held.find(keys)
        # First the one without a prefix: it would be chosen among equals.
        worth = [(self._worth(request, replica, keys, found.get(replica, 0))) for replica in (self._idlest(), *found)]
        _, fewest, chosen = min(worth)
        left = self._assign(request, chosen, self._prefill_s(request, chosen, -fewest * self._block_size))
        left.keys = len(keys)
        self._held.use(chosen, keys)
        return chosen

    def _worth(self, request: Request, replica: int, keys: Sequence[Key], held: int) -> tuple[float, int, int]:
        """What a replica is ranked by, the least first: its work less what it saves, in seconds. held: how many of the
        keys it holds."""
        # As many uses ago as there are requests that are not over, about the oldest of those came.
        shared = self._held.count_shared(replica, keys, held, self._held.uses - len(self._left))
        nothing, others, all_s = (
            self._prefill_s(request, replica, blocks * self._block_size) for blocks in (0, shared, held)
        )
        return self._work[replica] - (nothing - others) - OWN_WEIGHT * (others - all_s), -held, replica

    def found(self, request: Request, cached: int) -> None:
        """The request begins on its replica, which has the KV of so many of its tokens."""
        left = self._left[request]
        if not left.has_token:
            prefill_s = self._prefill_s(request, left.replica, cached)
            self._change(left.replica, prefill_s - left.prefill_s)
            left.prefill_s = prefill_s

    def ended(self, request: Request, reason: FinishReason) -> None:
        left = self._left[request]
        super().ended(request, reason)
        if left.has_token and left.keys:
            self._held.extend(left.replica, self._keys(request, 1), left.keys)

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Admitted):
                self.found(event.request, event.cached)
        super().observe(replica, events)

    def _keys(self, request: Request, last: int) -> Sequence[Key]:
        """The keys of the request's tokens, but for the `last` ones, as far as they are looked up."""
        if request.prefix is None:
            return ()
        size = self._block_size
        count = min(MOST_KEYS, (len(request.prompt) + len(request.output) - last) // size)
        return request.prefix.keys(request, count * size)[:count]


DISPATCH_RULES = ("round-robin", "least-work", "least-work-oracle", "prefix-aware")


def make_dispatch(
    name: str,
    replicas: int,
    cost: CostModel,
    oracle: Callable[[Request], int],
    *,
    blocks: int = 0,
    block_size: int = 1,
) -> Dispatch:
    """The rule called `name`, one of `DISPATCH_RULES`: `least-work` and `prefix-aware` learn lengths from requests that
    ended, as the server does, and expect none above its max_tokens; `least-work-oracle` has them from the oracle.
    blocks, block_size: see `PrefixAware.join`. Raises ValueError for another name."""
    if name == "round-robin":
        return RoundRobin(replicas)
    if name not in DISPATCH_RULES:
        raise ValueError(f"dispatch must be one of {', '.join(DISPATCH_RULES)}, got {name!r}")
    if name == "prefix-aware":
        aware = prefix_aware()
        for replica in range(replicas):
            aware.join(replica, cost, blocks, block_size)
        return aware
    rule = least_work() if name == "least-work" else LeastWork(oracle)
    for replica in range(replicas):
        rule.join(replica, cost)
    return rule


def least_work() -> LeastWork:
    """Least work by lengths that are learnt from the requests that ended."""
    lengths = LearntLength()
    return LeastWork(lengths.predict, learn=lengths.learn)


def prefix_aware() -> PrefixAware:
    """As `least_work`, with prefixes."""
    lengths = LearntLength()
    return PrefixAware(lengths.predict, learn=lengths.learn)
