"""Rivals of the arena that are no recipes of the package, each in its simplest form."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Allocation, Callbacks, Deferral
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.ordering import Fcfs
from skipjoin.policies.predictors import ForecastQuantile, forecast_tokens
from skipjoin.policies.valued import Valued
from skipjoin.recipes import Forecasts, Settings, recipe
from skipjoin.recipes.parts import classed, greedy, preemptive

# Seconds between new response ratios, and seconds of age after which a request ranked by length runs anyway.
_TICK_S, _STARVED_S = 1.0, 120.0
# Decay per second of the boost. The literature chooses it from the tail of the lengths, which is unknown here.
_BOOST_PER_S = 0.02
# Finished requests whose lengths stand for those of running ones.
_HISTORY = 1000


class ResponseRatio:
    """Value of highest response ratio next: (wait + service) / service, once a request has started it stays first."""

    def __init__(self, time: ExecutionTime, lengths: Callable[[Request], float]) -> None:
        self._time = time
        self._lengths = lengths

    @property
    def revision(self) -> int:
        return self._time.revision

    def key(self, request: Request, known: int, now: float) -> tuple[bool, float]:
        if known > len(request.prompt):
            return (False, 0.0)
        uncached = known - request.progress.reached
        service = self._time.prompt(uncached) + self._lengths(request) * self._time.decode(known)
        return (True, -(now - request.arrival) / service)

    def until(self, request: Request, now: float) -> float:
        return now + _TICK_S if not request.progress.output else math.inf

    def tokens(self, request: Request, known: int) -> int:
        return request.max_total_tokens


class ShortestPrefill:
    """Value of the fewest uncached prompt tokens, once a request has started it stays first."""

    revision = 0

    def key(self, request: Request, known: int, now: float) -> tuple[bool, int]:
        is_waiting = known == len(request.prompt)
        return (is_waiting, known - request.progress.reached if is_waiting else 0)

    def until(self, request: Request, now: float) -> float:
        return math.inf

    def tokens(self, request: Request, known: int) -> int:
        return request.max_total_tokens


class NonPreemptive(Valued):
    """Ordering by value in which no request evicts another."""

    def outranks(self, one: Request, other: Request) -> bool:
        return False


class PredictedLength:
    """Value of learning to rank (order only): shortest predicted output first, starved requests before all."""

    revision = 0

    def key(self, request: Request, known: int, now: float) -> tuple[bool, float]:
        return (now < request.arrival + _STARVED_S, forecast_tokens(request))

    def until(self, request: Request, now: float) -> float:
        starved = request.arrival + _STARVED_S
        return starved if now < starved else math.inf

    def tokens(self, request: Request, known: int) -> int:
        return request.max_total_tokens


class Boosted:
    """Value of boost scheduling on attained service: the arrival, earlier the less a request has received."""

    def __init__(self, time: ExecutionTime) -> None:
        self._time = time

    @property
    def revision(self) -> int:
        return self._time.revision

    def key(self, request: Request, known: int, now: float) -> tuple[float]:
        prompt = len(request.prompt)
        attained = self._time.prefill(prompt) + (known - prompt + 1) * self._time.decode(prompt)
        return (request.arrival + math.log1p(-math.exp(-_BOOST_PER_S * attained)) / _BOOST_PER_S,)

    def until(self, request: Request, now: float) -> float:
        return math.inf

    def tokens(self, request: Request, known: int) -> int:
        return known + max(1, (known - len(request.prompt)) // 2)


class PastFuture(Callbacks):
    """Admission while the predicted peak of all holders' KV fits the pool.

    The remaining length of a request is the median of the recent lengths above what it has generated.
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def on_finished(self, request: Request, now: float) -> None:
        if request.progress.finish_reason is not FinishReason.STOP:
            return
        if len(self._recent) == _HISTORY:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(len(request.progress.output))
        insort(self._sorted, len(request.progress.output))

    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        blocks = kv.blocks_for(request.progress.known)
        allocation = Allocation(now=blocks, blocks=blocks)
        holders = kv.holders()
        if kv.blocks_of(request) is not None or not holders:
            return allocation
        return allocation if self._peak([*holders, request]) <= kv.device_total * kv.block_size else Deferral.INCOMING

    def _peak(self, requests: list[Request]) -> float:
        """Return the most tokens that the requests hold together, if each leaves at its predicted length."""
        parts = sorted(
            ((self._remaining(len(one.progress.output)), one.progress.known) for one in requests), reverse=True
        )
        held = peak = 0.0
        for number, (remaining, known) in enumerate(parts, 1):
            held += known
            peak = max(peak, held + number * remaining)
        return peak

    def _remaining(self, generated: int) -> int:
        at = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - at
        return self._sorted[at + longer // 2] - generated if longer else max(1, generated)


@recipe(forecasts=Forecasts.LEARNED)
def hrrn(s: Settings) -> Policies:
    """Highest response ratio next, by predicted service, without preemption."""
    value = ResponseRatio(ExecutionTime(s.cost), ForecastQuantile(0.5))
    batcher = greedy(s, s.max_tokens, chunked=True)
    return classed(s, lambda: NonPreemptive(value), batcher, OnDemand(), Recompute())


@recipe
def shortest_prefill(s: Settings) -> Policies:
    """Shortest prefill first, by uncached tokens, without preemption."""
    batcher = greedy(s, s.max_tokens, chunked=True)
    return classed(s, lambda: NonPreemptive(ShortestPrefill()), batcher, OnDemand(), Recompute())


@recipe(forecasts=Forecasts.LEARNED)
def ltr(s: Settings) -> Policies:
    """Learning to rank, order only: shortest predicted output first."""
    return preemptive(s, lambda: Valued(PredictedLength()))


@recipe
def uniboost(s: Settings) -> Policies:
    """Boost scheduling on attained service, between first come, first served and shortest first, without forecasts."""
    return preemptive(s, lambda: Valued(Boosted(ExecutionTime(s.cost))))


@recipe
def past_future(s: Settings) -> Policies:
    """First come, first served with Past-Future admission."""
    return classed(s, Fcfs, greedy(s, s.max_tokens, chunked=False), PastFuture(), Recompute())
