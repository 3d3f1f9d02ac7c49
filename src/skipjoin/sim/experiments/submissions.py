from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice

from skipjoin.config import ConfigError
from skipjoin.core.request import NO_TARGET, ProgramId, Request, RequestOptions, ServiceClass, Target
from skipjoin.observe.record import Slo
from skipjoin.observe.requests import Kind
from skipjoin.sim.closed import ClosedArrivals, ClosedStream
from skipjoin.sim.driver import Arrivals
from skipjoin.sim.experiments.predictors import Predictor
from skipjoin.sim.experiments.system import System
from skipjoin.sim.programs import Calls, ProgramArrivals
from skipjoin.workload.fields import MAX_REQUESTS
from skipjoin.workload.request import WorkloadRequest, chains_of
from skipjoin.workload.streams import Closed, ClosedMode

# Stop token that ends a request at its true length. Only the number of tokens matters.
END = 1
_STOP = frozenset([END])
# Number of jobs of a closed stream that are drawn and predicted at once.
_BLOCK = 256


class Submissions:
    """Jobs of one shard, by request id: those of the workload, then those of closed streams."""

    def __init__(self, system: System, jobs: Iterable[WorkloadRequest], slo: Slo, predictor: Predictor | None) -> None:
        self.jobs = list(jobs)
        self.lengths = [job.output_tokens for job in self.jobs]
        self.rejected: list[Kind] = []  # jobs of closed streams, each replaced at once by the next one
        self._system = system
        self._target = Target(_or_never(slo.ttft_s), _or_never(slo.tpot_s))
        self._predictor = predictor

    def arrivals(self, taken: Iterable[int], closed: Iterable[ClosedStream] = ()) -> Arrivals:
        # A generator, so that finished requests can be garbage collected.
        requests = (self._request(number, self.jobs[number].at) for number in taken)
        streams, taken = list(closed), list(taken)
        if any(self.jobs[number].pause_s is not None for number in taken):
            return self._programs(taken)
        return ClosedArrivals(requests, streams) if streams else Arrivals(requests)

    def _programs(self, taken: Sequence[int]) -> Arrivals:
        chains = [[taken[index] for index in chain] for chain in chains_of(self.jobs[number] for number in taken)]
        alone = (self._request(first, self.jobs[first].at) for first, *others in chains if not others)
        programs = [
            (self.jobs[chain[0]].at, Calls((number, self.jobs[number].pause_s or 0.0) for number in chain))
            for chain in chains
            if len(chain) > 1
        ]
        return ProgramArrivals(alone, programs, self._request)

    def closed_stream(
        self, closed: Closed, jobs: Iterator[WorkloadRequest], size: int, duration_s: float | None
    ) -> ClosedStream:
        numbers = self._numbers(closed, jobs)
        return ClosedStream(
            size,
            partial(self._submit, numbers),
            together=closed.mode is ClosedMode.BATCH,
            until=_or_never(duration_s),
        )

    def _submit(self, numbers: Iterator[int], now: float) -> Request:
        return self._request(next(numbers), now)

    def _numbers(self, closed: Closed, jobs: Iterator[WorkloadRequest]) -> Iterator[int]:
        for block in count():
            first, refused = len(self.jobs), 0
            if first > MAX_REQUESTS:
                raise ConfigError(
                    f"closed stream {closed.name}: more than {MAX_REQUESTS} requests before the end: choose a shorter "
                    "duration (--duration)"
                )
            self._draw(list(islice(jobs, _BLOCK)), f" {closed.name} {block}")
            for number in range(first, len(self.jobs)):
                if self._system.takes(self.jobs[number]):
                    yield number
                else:
                    refused += 1
                    self.rejected.append(closed.kind)
            if refused == _BLOCK:
                raise ConfigError(f"closed stream {closed.name}: none of {_BLOCK} jobs fits into the context or the KV")

    def _draw(self, jobs: list[WorkloadRequest], name: str) -> None:
        self.jobs += jobs
        self.lengths += (job.output_tokens for job in jobs)
        if self._predictor is not None:
            self._predictor.extend(jobs, name)

    def _request(self, number: int, at: float) -> Request:
        job = self.jobs[number]
        usual = self._target if job.service is ServiceClass.REAL_TIME else NO_TARGET
        return Request(
            number,
            at,
            range(job.prompt_tokens),
            self._system.max_tokens_of(job),
            stop_tokens=_STOP,
            options=RequestOptions(
                service=job.service,
                priority=job.priority,
                deadline_s=job.deadline_s,
                target=job.target.with_default(usual),
                client=job.key,
                program=ProgramId(job.key, job.program) if job.program else None,
            ),
            prefix=self._system.prefix_of(job),
        )


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
