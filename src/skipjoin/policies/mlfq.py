"""Skip-join multi-level feedback queue: the ordering of FastServe."""

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
    """What skip-join MLFQ knows about a request.

    level: its queue, 0 first. place: its position in that queue's FIFO order. used: seconds of its quantum spent.
    last: when it last ran, or arrived. home: the level and the seconds used there that it returns to after a
    promotion, or None.
    """

    level: int
    place: int
    used: float
    last: float
    home: tuple[int, float] | None = None


# Share of the time that promoted requests may take.
PROMOTION_SHARE = 0.05
# How fast the estimate of the batch size follows the steps.
_BATCH_RATE = 0.05


class SkipJoinMlfq(Callbacks):
    """Skip-join multi-level feedback queue (FastServe section 4.1).

    Queue i has a quantum of `2^i` times the shortest iteration. A request joins the first queue whose quantum
    covers its prefill, is demoted when it has used its quantum up, and is promoted to the first queue after it has
    not run for `starvation_s` seconds: for one quantum of that queue, after what it takes to compute again what it
    lost, then it returns to where it was (promotion for good turns the queues into round robin at overload).
    Promotions are paced, so that they take no more than `promotion_share` of the time. A request is charged the
    profiled time of its own slices, not the time of the batch that they shared. Within a queue the order is FIFO: a
    request that runs keeps its place, one that is demoted or promoted joins the tail.

    cost: the profile. levels: number of queues. quantum_s: the first quantum; None: the shortest iteration, also
    after the profile revises itself: every request then keeps its queue and the share of its quantum that is used.
    hysteresis_s: turns that are less than this apart count as equal, so that KV does not move for them.
    promotion_share: share of the time that promoted requests may take; infinite: every request that starves is promoted
    at once, which bounds waiting but at overload leaves time for little else.
    skip_join: False joins every request to the first queue (plain MLFQ).
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
        # A plain dict that is emptied from its front is read slowly: it steps over what is gone.
        self._queues: list[OrderedDict[Request, _Job]] = [OrderedDict() for _ in range(levels)]
        self._jobs: dict[Request, _Job] = {}
        self._places = count()
        # (when to look whether the request starves, its id, the request); one entry per request, and some of those
        # that left.
        self._watch: list[tuple[float, int, Request]] = []
        self._decode_seconds: dict[int, float] = {}
        self._grain_s = hysteresis_s
        self._promotion_share = promotion_share
        self._next_promotion = -math.inf  # none before
        self._batch = 1.0  # requests in a step, of late

    def arrived(self, request: Request, now: float) -> None:
        if self._cost.revision != self._revision:
            self._revise()
        level = self._covering(self._prefill_seconds(request.known - request.reached)) if self._skip_join else 0
        job = self._jobs[request] = _Job(level, next(self._places), 0.0, now)
        self._queues[level][request] = job
        heapq.heappush(self._watch, (now + self._starvation_s, request.id, request))

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        if self._cost.revision != self._revision:
            self._revise()
        jobs, quanta, decode_seconds = self._jobs, self._quanta, self._decode_seconds
        if slices:
            self._batch += _BATCH_RATE * (len(slices) - self._batch)
        for piece in slices:
            job = jobs[piece.request]
            job.last = now
            if piece.tokens == 1:
                # Profiled decode time, looked up by context in steps of 64 tokens: it changes slowly.
                bucket = piece.start >> 6
                seconds = decode_seconds.get(bucket) or self._fill_decode_seconds(bucket)
            else:
                seconds = self._cost.step(StepShape.of((piece,)))
            if job.home is not None and (piece.tokens > 1 or not piece.samples):
                # A promotion is for a quantum beyond what must be computed again, however that is cut. Cut, it takes
                # longer than the pace of promotions was told.
                if not piece.samples:
                    self._next_promotion += seconds / self._promotion_share
                continue
            job.used += seconds
            if job.used >= quanta[job.level]:
                self._step_down(piece.request, job)

    def finished(self, request: Request, now: float) -> None:
        job = self._jobs.pop(request)
        del self._queues[job.level][request]
        # Entries of requests that left go when they come up; where that may take long, they are swept out.
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

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        """By estimated next scheduled time (section 4.2), in units of the hysteresis: the time to promotion, or the
        time in which those in the queues above use up their quanta down to this queue, whichever comes first."""
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
        # Promotions follow each other at their pace, and no sooner than the next one may be.
        at, pace = max(0.0, self._next_promotion - now), self._quanta[0] / self._promotion_share
        for due, place, request in starving:
            at = max(at, due)
            level = jobs[request].level
            turns.append((min(int(at / grain), keys[level]), level, place, request))
            at += pace
        turns.sort()
        return [(turn[0], turn[3]) for turn in turns]

    def level(self, request: Request) -> int:
        """The queue that the request is in, 0 first."""
        return self._jobs[request].level

    def _seconds_above(self) -> list[float]:
        """Of each queue, how long the requests in the queues above it run until they have come down to it, `_batch`
        of them at a time, if none finishes."""
        seconds, total, above = [], 0.0, 0
        for quantum, queue in zip(self._quanta, self._queues, strict=True):
            seconds.append(total / self._batch)
            above += len(queue)
            total += above * quantum
        return seconds

    # -- moving between queues ----------------------------------------------------------------------------

    def _step_down(self, request: Request, job: _Job) -> None:
        """The quantum is used up: return from a promotion, or demote to the first queue below whose quantum covers
        the next iteration (for a decode that is the next queue)."""
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
        """Up to the first queue, for one quantum beyond what was lost and must be computed again."""
        again = self._prefill_seconds(request.pending)
        job.home = (job.level, job.used)
        self._join(request, job, 0, 0.0)
        self._next_promotion = now + again / self._promotion_share

    # -- the profile --------------------------------------------------------------------------------------

    def _revise(self) -> None:
        """Work by what the cost model answers now."""
        self._revision = self._cost.revision
        self._decode_seconds.clear()
        if not self._follows_cost:
            return
        shortest = self._cost.step(StepShape(decodes=1, context=1))
        scale = shortest / self._quanta[0]
        # Not scaled: rounding could leave the first a hair longer than the iteration that is to use it up.
        self._quanta = [shortest * 2**level for level in range(len(self._quanta))]
        for job in self._jobs.values():
            job.used *= scale
            if job.home is not None:
                job.home = (job.home[0], job.home[1] * scale)

    def _covering(self, seconds: float) -> int:
        """The first queue whose quantum is at least `seconds`; the last one if none is."""
        for level, quantum in enumerate(self._quanta):
            if quantum >= seconds:
                return level
        return len(self._quanta) - 1

    def _prefill_seconds(self, tokens: int) -> float:
        if tokens == 1:  # a slice of one token is computed, and charged, as a decode
            return self._cost.step(StepShape(decodes=1, context=1))
        return self._cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))

    def _fill_decode_seconds(self, bucket: int) -> float:
        seconds = self._cost.step(StepShape(decodes=1, context=(bucket << 6) + 1))
        self._decode_seconds[bucket] = seconds
        return seconds
