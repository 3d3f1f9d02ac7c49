from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol, Self

from skipjoin.core.events import Admitted, Event, Finished, Token
from skipjoin.core.policy import CostModel
from skipjoin.core.prefixes import Key
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import StepShape
from skipjoin.policies.held_prefixes import HeldPrefixes
from skipjoin.policies.predictors import LearnedLength

# Work is priced within a step of this many decodes: a token as its share of that step, a prompt as what it adds.
_TYPICAL_BATCH = 32
# The heap of replicas is rebuilt when it has this many entries per replica, most of them stale.
_MAX_ENTRIES = 4
# Seconds of work that one second of saved prefill is worth while hardly any other request uses the prefix. Queued work
# passes, whereas the next turn of a conversation finds its prefix there again.
OWN_WEIGHT = 8.0
# Bounds the time of a choice to a few milliseconds.
MAX_KEYS = 2048
# Finish reasons of requests that were not cut short.
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Dispatch(Protocol):
    """Policy that assigns each arriving request to a replica."""

    ignores_tokens: bool  # whether `observe` needs no token events

    def choose(self, request: Request) -> int: ...
    def observe(self, replica: int, events: Sequence[Event]) -> None: ...


class RoundRobin:
    ignores_tokens = True

    def __init__(self, replicas: int) -> None:
        self._order = cycle(range(replicas))

    def choose(self, request: Request) -> int:
        return next(self._order)

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        pass


class _Prices:
    __slots__ = ("_batch_s", "_cost", "token_s")

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._batch_s = cost.step(StepShape(decodes=_TYPICAL_BATCH, context=_TYPICAL_BATCH))
        self.token_s = self._batch_s / _TYPICAL_BATCH

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        pairs = tokens * context + tokens * (tokens + 1) // 2
        return self._cost.step(StepShape(tokens, pairs, _TYPICAL_BATCH, _TYPICAL_BATCH)) - self._batch_s


@dataclass(slots=True)
class _Left:
    replica: int
    prefill_s: float
    token_s: float
    tokens: int  # expected number of further output tokens, of `token_s` seconds each
    has_token: bool = False
    keys: int = 0


class LeastWork:
    """Chooses the replica with the least estimated remaining work in seconds, and the first among equals.

    `lengths` predicts the total output tokens of a request, again when it exceeds the prediction. `learn` is called
    with every request that finished by itself.
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
        # Heap of (work, replica) with stale entries, and the replicas whose current work may not be in it.
        self._least: list[tuple[float, int]] = []
        self._changed: set[int] = set()

    @classmethod
    def learning(cls) -> Self:
        lengths = LearnedLength()
        return cls(lengths.predict, learn=lengths.learn)

    def join(self, replica: int, cost: CostModel) -> None:
        self._prices[replica] = _Prices(cost)
        self._work[replica] = 0.0
        self._changed.add(replica)

    def leave(self, replica: int) -> None:
        del self._prices[replica], self._work[replica]
        self._changed.discard(replica)
        self._left = {request: left for request, left in self._left.items() if left.replica != replica}

    def work(self, replica: int) -> float:
        return self._work[replica]

    def choose(self, request: Request) -> int:
        chosen = self._idlest()
        self._assign(request, chosen, self._prefill_s(request, chosen))
        return chosen

    def _assign(self, request: Request, chosen: int, prefill_s: float) -> _Left:
        tokens = max(1, self._lengths(request) - len(request.progress.output))
        left = self._left[request] = _Left(chosen, prefill_s, self._prices[chosen].token_s, tokens)
        self._change(chosen, prefill_s + tokens * left.token_s)
        return left

    def _prefill_s(self, request: Request, replica: int, cached: int = 0) -> float:
        reached = max(cached, request.progress.reached)
        return self._prices[replica].prefill_s(len(request.prompt) + len(request.progress.output) - reached, reached)

    def generated(self, request: Request) -> None:
        left = self._left[request]
        change = left.prefill_s + left.token_s
        left.prefill_s = 0.0
        left.has_token = True
        left.tokens -= 1
        if left.tokens == 0:  # outgrew its prediction, unless it finishes now
            left.tokens = max(1, self._lengths(request) - len(request.progress.output))
            change -= left.tokens * left.token_s
        self._change(left.replica, -change)

    def ended(self, request: Request, reason: FinishReason) -> None:
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
        least, work = self._least, self._work
        for replica in self._changed:
            heapq.heappush(least, (work[replica], replica))
        self._changed.clear()
        if len(least) > _MAX_ENTRIES * len(work):
            least[:] = [(seconds, replica) for replica, seconds in work.items()]
            heapq.heapify(least)
        while work.get(least[0][1]) != least[0][0]:
            heapq.heappop(least)
        return least[0][1]


class PrefixAware(LeastWork):
    """Chooses the replica with the least work, minus the prefill time that its cached prefixes save the request.

    Saved time counts once where several unfinished requests share the prefix, because another replica that computes it
    once serves all later ones, and `OWN_WEIGHT` times otherwise.
    """

    def __init__(
        self, lengths: Callable[[Request], int], *, learn: Callable[[Request], object] = lambda request: None
    ) -> None:
        super().__init__(lengths, learn=learn)
        self._held = HeldPrefixes()
        self._block_size = 1

    def join(self, replica: int, cost: CostModel, blocks: int = 0, block_size: int = 1) -> None:
        """Add an idle replica with `blocks` KV blocks of `block_size` tokens, a size that all replicas share."""
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
        # The idlest comes first, so that it wins among equals.
        worth = [(self._worth(request, replica, keys, found.get(replica, 0))) for replica in (self._idlest(), *found)]
        _, fewest, chosen = min(worth)
        left = self._assign(request, chosen, self._prefill_s(request, chosen, -fewest * self._block_size))
        left.keys = len(keys)
        self._held.use(chosen, keys)
        return chosen

    def _worth(self, request: Request, replica: int, keys: Sequence[Key], held: int) -> tuple[float, int, int]:
        # The number of unfinished requests approximates how many uses ago the oldest of them arrived.
        shared = self._held.count_shared(replica, keys, held, self._held.uses - len(self._left))
        nothing, others, all_s = (
            self._prefill_s(request, replica, blocks * self._block_size) for blocks in (0, shared, held)
        )
        return self._work[replica] - (nothing - others) - OWN_WEIGHT * (others - all_s), -held, replica

    def found(self, request: Request, cached: int) -> None:
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
        size = self._block_size
        count = min(MAX_KEYS, (len(request.prompt) + len(request.progress.output) - last) // size)
        return request.keys(count * size)[:count]


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
    """Return the dispatch policy `name`, one of `DISPATCH_RULES`; `least-work-oracle` takes lengths from `oracle`."""
    if name == "round-robin":
        return RoundRobin(replicas)
    if name not in DISPATCH_RULES:
        raise ValueError(f"dispatch must be one of {', '.join(DISPATCH_RULES)}, got {name!r}")
    if name == "prefix-aware":
        aware = PrefixAware.learning()
        for replica in range(replicas):
            aware.join(replica, cost, blocks, block_size)
        return aware
    rule = LeastWork.learning() if name == "least-work" else LeastWork(oracle)
    for replica in range(replicas):
        rule.join(replica, cost)
    return rule
