from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count
from typing import Any

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Callbacks, CostModel, Fact
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepShape


class Promotion(Enum):
    """What a starving request gets in the first queue. Except with `FIRST_QUEUE`, it then returns to its former queue.

    Swapping a request in for a single token costs more than it gains: it is swapped out again, hardly closer to its
    end.
    """

    FIRST_QUEUE = "first-queue"  # it moves down queue by queue, as in Algorithm 1
    ONE_QUANTUM = "one-quantum"  # the quantum of the first queue
    OWN_QUANTUM = "own-quantum"  # the quantum of its former queue


@dataclass(slots=True)
class _Job:
    prefill: int  # tokens that it had to compute when it arrived
    level: int
    granted: int  # level of the quantum that it may use
    key: tuple[int, int]  # position in its queue, unique in it
    used: float
    last: float
    is_promoted: bool = False  # it has not used up the quantum of a promotion
    home: tuple[int, float] | None = None  # level and used seconds to restore after that; None to be demoted


class _Queue:
    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._keys: list[tuple[int, int]] = []

    def add(self, key: tuple[int, int], request: Request) -> None:
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.requests.insert(at, request)

    def remove(self, key: tuple[int, int]) -> None:
        at = bisect_left(self._keys, key)
        del self._keys[at], self.requests[at]


# Number of queues.
LEVELS = 16
# Maximum share of time for promoted requests where many wait.
PROMOTION_SHARE = 0.05
# Promotions are not limited while promoting all that wait, once per threshold, takes up to this share of the time.
# Beyond, their share falls with the square of that time, because at an overload they only take turns
# (benchmarks/papers/fastserve/choices).
_FREE_DEMAND = 0.2
# A request waits if it has not run for this share of the threshold.
_WAITING_SHARE = 0.125
# Share of the slots in use from which slots are short instead of memory.
_SLOTS_IN_USE = 0.9
# Default hysteresis in shortest iterations. Swapping one request out for another takes two steps of lead each way
# (`ProactiveSwap`), in which neither runs. It pays if the other one then runs for at least as long before its turn
# would have come anyway. Latency hardly depends on it (benchmarks/papers/fastserve/choices).
_HYSTERESIS_STEPS = 8
# Weight of the latest step in the mean batch size.
_BATCH_RATE = 0.05


def shortest_step(cost: CostModel) -> float:
    """Return the seconds of the shortest iteration, a decode of one request."""
    return cost.step(StepShape(decodes=1, context=1))


class LevelUse:
    """Requests per level over all feedback queues of a recipe, and how often requests changed their level."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.demotions = self.promotions = 0

    def measure(self, now: float) -> dict[str, list[float]]:
        return {
            "queue_requests": [self.requests[level] for level in range(LEVELS)],
            "queue_demotions_total": [self.demotions],
            "queue_promotions_total": [self.promotions],
        }


class SkipJoinMlfq(Callbacks):
    """Skip-join multi-level feedback queue (FastServe section 4.1).

    Queue i has a quantum of `2^i` times the shortest iteration. A request joins the first queue whose quantum covers
    its prefill, and is demoted when its quantum is used up by the profiled time of its own slices. Below the first
    queue, half of a decode's time counts in proportion to the request's context, unless slots are short: a request with
    twice the KV leaves memory to half as many others. Within a queue the order is FIFO. After `starvation_s` seconds
    without running, a request is promoted to the first queue, with the time to recompute lost KV for free.

    Args:
        quantum_s: First quantum; None uses the shortest iteration, and follows revisions of the cost model.
        hysteresis_s: Scheduled times that differ by less count as equal, so that KV does not move for them.
        promotion_share: Maximum share of time for promoted requests where many wait. Infinity bounds waiting, but
            leaves time for little else at overload.
        shortest_prefill: Whether requests are ordered by the tokens of their prefill, except in the first queue, so
            that none starves.
        skip_join: Whether requests skip queues; False is plain MLFQ.
        slots: Number of requests up to which memory alone limits the batch.
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        levels: int = LEVELS,
        quantum_s: float | None = None,
        starvation_s: float = 3.0,
        hysteresis_s: float | None = None,
        promotion_share: float = PROMOTION_SHARE,
        promotion: Promotion = Promotion.OWN_QUANTUM,
        shortest_prefill: bool = False,
        skip_join: bool = True,
        slots: float = math.inf,
        use: LevelUse | None = None,
    ) -> None:
        self._use = use or LevelUse()
        self._follows_cost, self._follows_steps = quantum_s is None, hysteresis_s is None
        shortest_s = shortest_step(cost)
        if quantum_s is None:
            quantum_s = shortest_s
        if hysteresis_s is None:
            hysteresis_s = _HYSTERESIS_STEPS * shortest_s
        self._cost = cost
        self._revision = cost.revision
        self._starvation_s = starvation_s
        self._skip_join = skip_join
        self._quanta = [quantum_s * 2**level for level in range(levels)]
        self._queues = [_Queue() for _ in range(levels)]
        self._jobs: dict[Request, _Job] = {}
        self._places = count()
        # (time of the next starvation check, request id, request): one entry per request, and stale ones of finished
        # requests.
        self._watch: list[tuple[float, int, Request]] = []
        self._decode_seconds: dict[int, float] = {}
        self._grain_s = hysteresis_s
        self._promotion_share = promotion_share
        self._promotion, self._shortest_prefill = promotion, shortest_prefill
        self._next_promotion = -math.inf  # earliest time of the next promotion
        self._batch = 1.0  # mean number of requests in a step
        self._slots = slots
        self._context = 0.0  # mean context of a decode
        self._share = promotion_share  # of the time for promotions, at present

    def on_arrived(self, request: Request, now: float) -> None:
        if self._cost.revision != self._revision:
            self._revise()
        prefill = request.progress.known - request.progress.reached
        level = self._covering(self._prefill_seconds(prefill)) if self._skip_join else 0
        job = self._jobs[request] = _Job(prefill, level, level, self._key(prefill, level), 0.0, now)
        self._queues[level].add(job.key, request)
        self._use.requests[level] += 1
        heapq.heappush(self._watch, (now + self._starvation_s, request.id, request))

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        if self._cost.revision != self._revision:
            self._revise()
        jobs, quanta, decode_seconds = self._jobs, self._quanta, self._decode_seconds
        if slices:
            self._batch += _BATCH_RATE * (len(slices) - self._batch)
        mean = self._context if self._batch < _SLOTS_IN_USE * self._slots else 0.0
        contexts = decodes = 0
        for slice_ in slices:
            job = jobs[slice_.request]
            job.last = now
            if slice_.tokens == 1:
                # Cached by buckets of 64 context tokens, as decode time changes slowly.
                bucket = slice_.start >> 6
                if (seconds := decode_seconds.get(bucket, 0.0)) == 0.0:
                    seconds = self._cost.step(StepShape(decodes=1, context=(bucket << 6) + 1))
                    decode_seconds[bucket] = seconds
                contexts += slice_.start
                decodes += 1
                if mean and job.level:
                    seconds *= 0.5 + 0.5 * slice_.start / mean
            else:
                seconds = self._cost.step(StepShape.of((slice_,)))
            if job.is_promoted and (slice_.tokens > 1 or not slice_.samples):
                # A promoted request gets a quantum besides its recomputation. If that is chunked, it takes longer than
                # `_promote` estimated, so later chunks delay the next promotion.
                if not slice_.samples:
                    self._next_promotion += seconds / self._share
                continue
            job.used += seconds
            if job.used >= quanta[job.granted]:
                self._step_down(slice_.request, job)
        if decodes:
            now_mean = contexts / decodes
            self._context += (_BATCH_RATE if self._context else 1) * (now_mean - self._context)

    def on_finished(self, request: Request, now: float) -> None:
        job = self._jobs.pop(request)
        self._queues[job.level].remove(job.key)
        self._use.requests[job.level] -= 1
        # Stale entries are dropped when due; sweep them when they outnumber the live ones.
        if len(self._watch) > 2 * len(self._jobs) + 256:
            self._watch = [entry for entry in self._watch if entry[2] in self._jobs]
            heapq.heapify(self._watch)

    def ranked(self, now: float) -> Iterator[Request]:
        self._promote_starving(now)
        return chain.from_iterable([queue.requests for queue in self._queues])

    def rank(self, request: Request) -> tuple[int, tuple[int, int]]:
        job = self._jobs[request]
        return (job.level, job.key)

    def outranks(self, one: Request, other: Request) -> bool:
        return self._jobs[one].level < self._jobs[other].level

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        """Order by estimated next scheduled time (section 4.2), in units of the hysteresis."""
        # KV of a starving request moves when it is promoted. In the paper it moves ahead of the promotion, so that the
        # request runs in its own queue, for a token that postpones the promotion, and is swapped out again.
        jobs, keys = self._jobs, [int(seconds / self._grain_s) for seconds in self._seconds_above()]
        turns = [(keys[job.level], job.level, job.key, request) for request in requests if (job := jobs[request])]
        turns.sort()  # keys differ: requests are never compared
        return [(turn[0], turn[3]) for turn in turns]

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        job, last = self._jobs[request], len(self._quanta) - 1
        quantum = self._quanta[job.granted]
        yield Fact("level", job.level, "", f"Queue that it is in, from 0, which runs first, to {last}.")
        meaning = "Computing time that it gets in this queue, half of which counts in proportion to its KV."
        yield Fact("quantum", quantum, "s", meaning)
        down = "a lower queue" if job.home is None else f"queue {job.home[0]}, from which it was promoted"
        yield Fact("quantum left", max(0.0, quantum - job.used), "s", f"Once it is used, the request moves to {down}.")
        if job.level > 0:
            due = max(job.last + self._starvation_s, self._next_promotion)
            meaning = "Unless it runs before, it then moves to the first queue, so that it does not starve."
            yield Fact("promotion in", max(0.0, due - now), "s", meaning)

    def may_await_prefix(self, request: Request, now: float) -> bool:
        # Requests of the first queue are promoted, or their prompt takes at most a quantum.
        return self._jobs[request].level > 0

    def level(self, request: Request) -> int:
        return self._jobs[request].level

    def _seconds_above(self) -> list[float]:
        seconds, total, above = [], 0.0, 0
        for quantum, queue in zip(self._quanta, self._queues, strict=True):
            seconds.append(total / self._batch)
            above += len(queue.requests)
            total += above * quantum
        return seconds

    # -- moving between queues ----------------------------------------------------------------------------

    def _step_down(self, request: Request, job: _Job) -> None:
        job.is_promoted = False
        if job.home is not None:
            level, used = job.home
            job.home = None
            self._join(request, job, level, used)
            return
        self._use.demotions += 1
        level = job.level + 1
        if (uncached := request.progress.known - request.progress.reached) > 1:
            level = max(level, self._covering(self._prefill_seconds(uncached)))
        self._join(request, job, min(level, len(self._quanta) - 1), 0.0)

    def _join(self, request: Request, job: _Job, level: int, used: float) -> None:
        self._queues[job.level].remove(job.key)
        self._use.requests[job.level] -= 1
        self._use.requests[level] += 1
        job.level, job.granted, job.used, job.key = level, level, used, self._key(job.prefill, level)
        self._queues[level].add(job.key, request)

    def _key(self, prefill: int, level: int) -> tuple[int, int]:
        return (prefill if self._shortest_prefill and level > 0 else 0, next(self._places))

    def _promote_starving(self, now: float) -> None:
        watch, wait = self._watch, self._starvation_s
        while watch and watch[0][0] <= now:
            _, _, request = watch[0]
            job = self._jobs.get(request)
            if job is None:
                heapq.heappop(watch)
                continue
            again = job.last + wait
            if again <= now:
                if job.level > 0:
                    if now < self._next_promotion:
                        return
                    self._promote(request, job, now)
                again = now + wait
            heapq.heapreplace(watch, (again, request.id, request))

    def _promote(self, request: Request, job: _Job, now: float) -> None:
        self._use.promotions += 1
        self._share, seconds, former = self._pace(now), self._promotion_seconds(request, job), job.level
        job.is_promoted = True
        job.home = None if self._promotion is Promotion.FIRST_QUEUE else (former, job.used)
        self._join(request, job, 0, 0.0)
        if self._promotion is Promotion.OWN_QUANTUM:
            job.granted = former
        self._next_promotion = now + seconds / self._share

    def _promotion_seconds(self, request: Request, job: _Job) -> float:
        # Recomputation takes steps of its own. Tokens after the next one share their steps with a batch. A request
        # without KV is expected to find what is cached.
        progress = request.progress
        again = self._prefill_seconds(max(1, progress.pending - (progress.reached - progress.computed)))
        granted = job.level if self._promotion is Promotion.OWN_QUANTUM else 0
        beside: float = (self._quanta[granted] - self._quanta[0]) / self._batch
        return again + beside

    def _pace(self, now: float) -> float:
        if self._promotion_share == math.inf:
            return math.inf
        since, demand_s = now - _WAITING_SHARE * self._starvation_s, 0.0
        for request, job in self._jobs.items():
            if job.level and job.last <= since:
                demand_s += self._promotion_seconds(request, job)
        demand = demand_s / self._starvation_s
        free = min(1.0, _FREE_DEMAND / demand) if demand else 1.0
        return max(self._promotion_share, free * free)

    # -- the profile --------------------------------------------------------------------------------------

    def _revise(self) -> None:
        self._revision = self._cost.revision
        self._decode_seconds.clear()
        shortest = shortest_step(self._cost)
        if self._follows_steps:
            self._grain_s = _HYSTERESIS_STEPS * shortest
        if not self._follows_cost:
            return
        scale = shortest / self._quanta[0]
        # Computed instead of scaled: rounding could make the first quantum slightly longer than an iteration.
        self._quanta = [shortest * 2**level for level in range(len(self._quanta))]
        for job in self._jobs.values():
            job.used *= scale
            if job.home is not None:
                job.home = (job.home[0], job.home[1] * scale)

    def _covering(self, seconds: float) -> int:
        for level, quantum in enumerate(self._quanta):
            if quantum >= seconds:
                return level
        return len(self._quanta) - 1

    def _prefill_seconds(self, tokens: int) -> float:
        if tokens == 1:  # a one-token slice is computed and charged as a decode
            return shortest_step(self._cost)
        return self._cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))
