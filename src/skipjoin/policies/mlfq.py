from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from skipjoin.core.policy import Callbacks, CostModel
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepShape


@dataclass(slots=True)
class _Job:
    """MLFQ state of a request.

    Attributes:
        home: Level and used seconds to restore after a promotion, or None.
    """

    level: int
    place: int
    used: float
    last: float
    home: tuple[int, float] | None = None


# Maximum share of time for promoted requests.
PROMOTION_SHARE = 0.05
# Weight of the latest step in the mean batch size.
_BATCH_RATE = 0.05


class SkipJoinMlfq(Callbacks):
    """Skip-join multi-level feedback queue (FastServe section 4.1).

    Queue i has a quantum of `2^i` times the shortest iteration. A request joins the first queue whose quantum covers
    its prefill, and is demoted when its quantum is used up. It is charged the profiled time of its own slices. Within a
    queue the order is FIFO: running requests keep their position, demoted and promoted ones join the tail.

    After `starvation_s` seconds without running, a request is promoted to the first queue for one quantum, plus the
    time to recompute lost KV. It then returns to its former queue, because permanent promotion turns the queues into
    round robin at overload.

    Args:
        quantum_s: First quantum; None uses the shortest iteration, and follows revisions of the cost model.
        hysteresis_s: Scheduled times that differ by less count as equal, so that KV does not move for them.
        promotion_share: Maximum share of time for promoted requests. Infinity bounds waiting, but leaves time for
            little else at overload.
        skip_join: Whether requests skip queues; False is plain MLFQ.
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        levels: int = 16,
        quantum_s: float | None = None,
        starvation_s: float = 3.0,
        hysteresis_s: float = 0.25,
        promotion_share: float = PROMOTION_SHARE,
        skip_join: bool = True,
    ) -> None:
        self._follows_cost = quantum_s is None
        if quantum_s is None:
            quantum_s = cost.step(StepShape(decodes=1, context=1))
        for name, value in (
            ("levels", levels),
            ("quantum_s", quantum_s),
            ("starvation_s", starvation_s),
            ("hysteresis_s", hysteresis_s),
            ("promotion_share", promotion_share),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        self._cost = cost
        self._revision = cost.revision
        self._starvation_s = starvation_s
        self._skip_join = skip_join
        self._quanta = [quantum_s * 2**level for level in range(levels)]
        # OrderedDict, because iterating a plain dict whose front was deleted scans the deleted entries.
        self._queues: list[OrderedDict[Request, _Job]] = [OrderedDict() for _ in range(levels)]
        self._jobs: dict[Request, _Job] = {}
        self._places = count()
        # (time of the next starvation check, request id, request): one entry per request, and stale ones of finished
        # requests.
        self._watch: list[tuple[float, int, Request]] = []
        self._decode_seconds: dict[int, float] = {}
        self._grain_s = hysteresis_s
        self._promotion_share = promotion_share
        self._next_promotion = -math.inf  # earliest time of the next promotion
        self._batch = 1.0  # mean number of requests in a step

    def on_arrived(self, request: Request, now: float) -> None:
        if self._cost.revision != self._revision:
            self._revise()
        level = self._covering(self._prefill_seconds(request.known - request.reached)) if self._skip_join else 0
        job = self._jobs[request] = _Job(level, next(self._places), 0.0, now)
        self._queues[level][request] = job
        heapq.heappush(self._watch, (now + self._starvation_s, request.id, request))

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        if self._cost.revision != self._revision:
            self._revise()
        jobs, quanta, decode_seconds = self._jobs, self._quanta, self._decode_seconds
        if slices:
            self._batch += _BATCH_RATE * (len(slices) - self._batch)
        for slice_ in slices:
            job = jobs[slice_.request]
            job.last = now
            if slice_.tokens == 1:
                # Cached by buckets of 64 context tokens, as decode time changes slowly.
                bucket = slice_.start >> 6
                seconds = decode_seconds.get(bucket) or self._fill_decode_seconds(bucket)
            else:
                seconds = self._cost.step(StepShape.of((slice_,)))
            if job.home is not None and (slice_.tokens > 1 or not slice_.samples):
                # A promoted request gets a quantum besides its recomputation. If that is chunked, it takes longer than
                # `_promote` estimated, so later chunks delay the next promotion.
                if not slice_.samples:
                    self._next_promotion += seconds / self._promotion_share
                continue
            job.used += seconds
            if job.used >= quanta[job.level]:
                self._step_down(slice_.request, job)

    def on_finished(self, request: Request, now: float) -> None:
        job = self._jobs.pop(request)
        del self._queues[job.level][request]
        # Stale entries are dropped when due; sweep them when they outnumber the live ones.
        if len(self._watch) > 2 * len(self._jobs) + 256:
            self._watch = [entry for entry in self._watch if entry[2] in self._jobs]
            heapq.heapify(self._watch)

    def ranked(self, now: float) -> Iterator[Request]:
        self._promote_starving(now)
        return chain.from_iterable(self._queues)

    def rank(self, request: Request) -> tuple[int, int]:
        job = self._jobs[request]
        return (job.level, job.place)

    def outranks(self, one: Request, other: Request) -> bool:
        return self._jobs[one].level < self._jobs[other].level

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        """Order by estimated next scheduled time (section 4.2), in units of the hysteresis."""
        jobs, grain, after = self._jobs, self._grain_s, self._starvation_s - now
        execute = self._seconds_above()
        keys = [int(seconds / grain) for seconds in execute]
        turns: list[tuple[int, int, int, Request]] = []  # places differ: requests are never compared
        starving: list[tuple[float, int, Request]] = []
        for request in requests:
            job = jobs[request]
            level = job.level
            due = job.last + after
            if due < execute[level]:
                starving.append((due, job.place, request))
            else:
                turns.append((keys[level], level, job.place, request))
        starving.sort()
        # Promotions are rate-limited, so starving requests follow each other at that pace.
        at, pace = max(0.0, self._next_promotion - now), self._quanta[0] / self._promotion_share
        for due, place, request in starving:
            at = max(at, due)
            level = jobs[request].level
            turns.append((min(int(at / grain), keys[level]), level, place, request))
            at += pace
        turns.sort()
        return [(turn[0], turn[3]) for turn in turns]

    def level(self, request: Request) -> int:
        return self._jobs[request].level

    def _seconds_above(self) -> list[float]:
        seconds, total, above = [], 0.0, 0
        for quantum, queue in zip(self._quanta, self._queues, strict=True):
            seconds.append(total / self._batch)
            above += len(queue)
            total += above * quantum
        return seconds

    # -- moving between queues ----------------------------------------------------------------------------

    def _step_down(self, request: Request, job: _Job) -> None:
        if job.home is not None:
            level, used = job.home
            job.home = None
            self._join(request, job, level, used)
            return
        level = job.level + 1
        if (uncached := request.known - request.reached) > 1:
            level = max(level, self._covering(self._prefill_seconds(uncached)))
        self._join(request, job, min(level, len(self._quanta) - 1), 0.0)

    def _join(self, request: Request, job: _Job, level: int, used: float) -> None:
        del self._queues[job.level][request]
        job.level, job.used, job.place = level, used, next(self._places)
        self._queues[level][request] = job

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
        again = self._prefill_seconds(request.pending)
        job.home = (job.level, job.used)
        self._join(request, job, 0, 0.0)
        self._next_promotion = now + again / self._promotion_share

    # -- the profile --------------------------------------------------------------------------------------

    def _revise(self) -> None:
        self._revision = self._cost.revision
        self._decode_seconds.clear()
        if not self._follows_cost:
            return
        shortest = self._cost.step(StepShape(decodes=1, context=1))
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
            return self._cost.step(StepShape(decodes=1, context=1))
        return self._cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))

    def _fill_decode_seconds(self, bucket: int) -> float:
        seconds = self._cost.step(StepShape(decodes=1, context=(bucket << 6) + 1))
        self._decode_seconds[bucket] = seconds
        return seconds
