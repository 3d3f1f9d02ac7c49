"""Orderings: who matters most now."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from skipjoin.core.policy import CostModel, LengthPredictor, Ordering
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepShape
from skipjoin.policies.ranking import Ranking


class FixedKey:
    """By a key that never changes, smallest first; equal keys by arrival.

    key: a comparable value per request.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._ranking = Ranking()

    def arrived(self, request: Request, now: float) -> None:
        self._ranking.rest(request, (self._key(request), request.arrival, request.id))

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        pass

    def evicted(self, request: Request, now: float) -> None:
        pass

    def left(self, request: Request, now: float) -> None:
        self._ranking.discard(request)

    def ranked(self, now: float) -> Iterator[Request]:
        return iter(self._ranking)

    def rank(self, request: Request) -> Any:
        return self._ranking.key(request)

    def outranks(self, one: Request, other: Request) -> bool:
        smaller: bool = self.rank(one)[0] < self.rank(other)[0]
        return smaller


class Fcfs(FixedKey):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__(lambda request: request.arrival)


class ShortestRemaining:
    """Least remaining work first, in seconds: tokens that have no KV yet, then the tokens that the predictor
    expects still to come. With true lengths this is SRPT, the bound that the other orderings are held against.

    When the cost model revises itself, requests that run get keys by it at once, those that wait keep theirs until
    they arrive, run or are evicted again: to re-sort all of them would cost the length of the queue.
    """

    def __init__(self, cost: CostModel, predictor: LengthPredictor) -> None:
        self._cost = cost
        self._predictor = predictor
        self._revision = cost.revision
        self._decode_seconds = cost.step(StepShape(decodes=1, context=1))
        self._ranking = Ranking()

    def arrived(self, request: Request, now: float) -> None:
        self._ranking.rest(request, self._key(request, request.known))

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        if self._cost.revision != self._revision:
            self._revision = self._cost.revision
            self._decode_seconds = self._cost.step(StepShape(decodes=1, context=1))
        change, key = self._ranking.change, self._key
        for piece in slices:
            request = piece.request
            # The token just sampled is not appended yet. Left out, it would lower the key at an eviction, and the
            # victim could outrank the request that it made way for.
            change(request, key(request, request.known + piece.samples))

    def evicted(self, request: Request, now: float) -> None:
        self._ranking.rest(request, self._key(request, request.known))

    def left(self, request: Request, now: float) -> None:
        self._ranking.discard(request)

    def ranked(self, now: float) -> Iterator[Request]:
        return iter(self._ranking)

    def rank(self, request: Request) -> tuple[float, float, int]:
        key: tuple[float, float, int] = self._ranking.key(request)
        return key

    def outranks(self, one: Request, other: Request) -> bool:
        return self.rank(one)[0] < self.rank(other)[0]

    def _key(self, request: Request, known: int) -> tuple[float, float, int]:
        generated = known - len(request.prompt)
        # Under-prediction: one more token is always expected.
        seconds = max(1, self._predictor.predict(request) - generated) * self._decode_seconds
        # Just sampled, a token waits for its own step, which is counted above; more than that is prefill.
        uncached = known - request.computed
        if uncached > 1:
            seconds += self._cost.step(StepShape(prefill=uncached, attention=uncached * (uncached + 1) // 2))
        return (seconds, request.arrival, request.id)


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


class SkipJoinMlfq:
    """Skip-join multi-level feedback queue (FastServe section 4.1).

    Queue i has a quantum of `2^i` times the shortest iteration. A request joins the first queue whose quantum
    covers its prefill, is demoted when it has used its quantum up, and is promoted to the first queue after it has
    not run for `starvation_s` seconds: for one quantum of that queue, then it returns to where it was (promotion
    for good turns the queues into round robin at overload). A request is charged the profiled time of its own
    slices, not the time of the batch that they shared. Within a queue the order is FIFO: who runs keeps its place,
    who is demoted or promoted joins the tail.

    cost: the profile. levels: number of queues. quantum_s: the first quantum; None: the shortest iteration, also
    after the profile revises itself: every request then keeps its queue and the share of its quantum that is used.
    skip_join: False joins every request to the first queue (plain MLFQ).
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        levels: int = 16,
        quantum_s: float | None = None,
        starvation_s: float = 3.0,
        skip_join: bool = True,
    ) -> None:
        self._follows_cost = quantum_s is None
        if quantum_s is None:
            quantum_s = cost.step(StepShape(decodes=1, context=1))
        for name, value in (("levels", levels), ("quantum_s", quantum_s), ("starvation_s", starvation_s)):
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

    def arrived(self, request: Request, now: float) -> None:
        if self._cost.revision != self._revision:
            self._revise()
        level = self._covering(self._prefill_seconds(request.pending)) if self._skip_join else 0
        job = self._jobs[request] = _Job(level, next(self._places), 0.0, now)
        self._queues[level][request] = job
        heapq.heappush(self._watch, (now + self._starvation_s, request.id, request))

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        if self._cost.revision != self._revision:
            self._revise()
        jobs, quanta, decode_seconds = self._jobs, self._quanta, self._decode_seconds
        for piece in slices:
            job = jobs[piece.request]
            job.last = now
            if piece.tokens == 1:
                # Profiled decode time, looked up by context in steps of 64 tokens: it changes slowly.
                bucket = piece.start >> 6
                seconds = decode_seconds.get(bucket) or self._fill_decode_seconds(bucket)
            else:
                seconds = self._cost.step(StepShape.of((piece,)))
            job.used += seconds
            if job.used >= quanta[job.level]:
                self._step_down(piece.request, job)

    def evicted(self, request: Request, now: float) -> None:
        pass

    def left(self, request: Request, now: float) -> None:
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

    def level(self, request: Request) -> int:
        """The queue that the request is in, 0 first."""
        return self._jobs[request].level

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
        if request.known - request.computed > 1:
            level = max(level, self._covering(self._prefill_seconds(request.known - request.computed)))
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
                    job.home = (job.level, job.used)
                    self._join(request, job, 0, 0.0)
                again = now + wait
            heapq.heapreplace(watch, (again, request.id, request))

    # -- the profile --------------------------------------------------------------------------------------

    def _revise(self) -> None:
        """Work by what the cost model answers now."""
        self._revision = self._cost.revision
        self._decode_seconds.clear()
        if not self._follows_cost:
            return
        scale = self._cost.step(StepShape(decodes=1, context=1)) / self._quanta[0]
        self._quanta = [quantum * scale for quantum in self._quanta]
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


class Prioritized:
    """Strict priorities around any ordering: requests of a lower `priority` number come first, and each number has
    an ordering of its own. While all requests have the same number, this is that ordering.

    make: builds the ordering of one priority number.
    """

    def __init__(self, make: Callable[[], Ordering]) -> None:
        self._make = make
        self._bands: dict[int, Ordering] = {}
        self._sorted: list[Ordering] = []
        self._sizes: dict[int, int] = {}

    def arrived(self, request: Request, now: float) -> None:
        number = request.priority
        if number not in self._bands:
            self._bands[number] = self._make()
            self._sizes[number] = 0
            self._sort()
        self._sizes[number] += 1
        self._bands[number].arrived(request, now)

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        if len(self._sorted) == 1:
            self._sorted[0].ran(slices, now)
            return
        by_band: dict[int, list[Slice]] = {}
        for piece in slices:
            by_band.setdefault(piece.request.priority, []).append(piece)
        for number, pieces in by_band.items():
            self._bands[number].ran(pieces, now)

    def evicted(self, request: Request, now: float) -> None:
        self._bands[request.priority].evicted(request, now)

    def left(self, request: Request, now: float) -> None:
        number = request.priority
        self._bands[number].left(request, now)
        self._sizes[number] -= 1
        # Priorities are any integers a user sends: an empty band is not kept.
        if not self._sizes[number]:
            del self._bands[number], self._sizes[number]
            self._sort()

    def ranked(self, now: float) -> Iterator[Request]:
        # All bands are asked at once: what time does to their orders happens now, not while somebody reads on.
        return chain.from_iterable([band.ranked(now) for band in self._sorted])

    def rank(self, request: Request) -> tuple[int, Any]:
        return (request.priority, self._bands[request.priority].rank(request))

    def outranks(self, one: Request, other: Request) -> bool:
        if one.priority != other.priority:
            return one.priority < other.priority
        return self._bands[one.priority].outranks(one, other)

    def _sort(self) -> None:
        self._sorted = [self._bands[number] for number in sorted(self._bands)]
