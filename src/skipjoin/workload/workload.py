from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat, takewhile
from typing import Any, Protocol, TypeVar

from skipjoin.config import ConfigError
from skipjoin.core.request import ServiceClass
from skipjoin.workload.arrivals import Arrivals, parse_arrivals
from skipjoin.workload.fields import check_requests, in_bounds
from skipjoin.workload.lengths import parse_lengths
from skipjoin.workload.prefixes import parse_shared_prefix
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.streams import Closed, Stream, generator, parse_stream
from skipjoin.workload.traces import Trace

DEFAULT = "default"


class Workload(Protocol):
    """Requests over time. Equal arguments give equal jobs, on every machine.

    Attributes:
        best_effort: Share of best-effort jobs, which splits jobs into one stream per class. None keeps the streams.
        closed: Closed-loop streams, whose jobs `draw` does not return.
    """

    @property
    def best_effort(self) -> float | None: ...
    @property
    def closed(self) -> tuple[Closed, ...]: ...

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        """Return jobs in order of time: those before `duration_s`, or the first `limit`.

        Closed-loop streams require `duration_s`. A longer duration or a higher limit only appends jobs.
        """

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Synthetic:
    """Jobs drawn from streams of unique names, whose shares add up to 1."""

    streams: tuple[Stream, ...]
    best_effort: float | None = None
    closed: tuple[Closed, ...] = ()

    def __post_init__(self) -> None:
        services = {stream.service for stream in self.streams}
        _check_best_effort(self.best_effort, has_classes=ServiceClass.BEST_EFFORT in services)
        total = sum(stream.share for stream in self.streams)
        if not math.isclose(total, 1):
            raise ConfigError(f"the shares of the streams must add up to 1, got {total:g}")
        _check_names(self, [stream.name for stream in self.streams])

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        rate = in_bounds("rate_rps", rate_rps)
        _check_extent(self, duration_s, limit)
        check_requests(rate, duration_s, limit)
        streams = (
            _with_classes(stream.jobs(rate, seed, index), self.best_effort, seed, index)
            for index, stream in enumerate(self.streams)
        )
        return _cut(heapq.merge(*streams, key=lambda job: job.at), duration_s, limit)

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        record: dict[str, Any] = {
            "lengths": " + ".join(stream.lengths.name for stream in self.streams),
            "arrivals": " + ".join(stream.arrivals.name for stream in self.streams),
            "rate_rps": rate_rps,
            **_extent(self, duration_s, seed, limit),
        }
        if len(self.streams) > 1 or self.streams[0].prefix is not None:
            record["streams"] = [stream.describe() for stream in self.streams]
        return record


@dataclass(frozen=True)
class Replay:
    """Requests of a trace, at their recorded times from 0 or with an arrival process.

    With the latter, rows are used cyclically from one that the seed selects.
    """

    trace: Trace
    speedup: float = 1.0
    arrivals: Arrivals | None = None
    best_effort: float | None = None
    closed: tuple[Closed, ...] = ()

    def __post_init__(self) -> None:
        in_bounds("speedup", self.speedup)
        if self.best_effort is not None and self.trace.has_any("class"):
            raise ConfigError(f"best_effort and the column class of {self.trace.name} exclude each other")
        _check_best_effort(self.best_effort)
        _check_names(self, [DEFAULT])
        if self.closed and self.trace.has_any("pause_s"):
            raise ConfigError(f"closed and the column pause_s of {self.trace.name} exclude each other")
        if not self.trace.has_arrivals and self.arrivals is None:
            raise ConfigError(f"{self.trace.name} has no arrival times: give a pattern of arrivals")
        if not self.trace.has_arrivals and self.speedup != 1:
            raise ConfigError(f"speedup needs a trace with arrival times, and {self.trace.name} has none")

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        """With neither `duration_s` nor `limit`, each row is used once."""
        rows = len(self.trace.rows)
        if duration_s is None and limit is None:
            limit = rows
        _check_extent(self, duration_s, limit)
        if not self.trace.has_arrivals:
            rate = in_bounds("rate_rps", rate_rps)
            check_requests(rate, duration_s, limit)
            jobs = self._at_rate(rate, seed)
        elif limit is not None and limit > rows:
            raise ConfigError(f"limit must be at most {rows}, the rows of {self.trace.name}, got {limit}")
        else:
            jobs = self._as_recorded()
        return _cut(_with_classes(jobs, self.best_effort, seed, 0), duration_s, limit)

    def _as_recorded(self) -> Iterator[WorkloadRequest]:
        first = self.trace.rows[0].arrival_s or 0.0
        for row in range(len(self.trace.rows)):
            yield self._job(row, ((self.trace.rows[row].arrival_s or 0.0) - first) / self.speedup)

    def _at_rate(self, rate_rps: float, seed: int) -> Iterator[WorkloadRequest]:
        assert self.arrivals is not None
        rows = len(self.trace.rows)
        row = int(generator(seed, 0, "offset").random() * rows)
        for time in self.arrivals.times(generator(seed, 0, "arrivals")):
            yield self._job(row, time / rate_rps)
            row = (row + 1) % rows

    def _job(self, row: int, at: float) -> WorkloadRequest:
        _, prompt, output, text, asked, parts, program, pause_s = self.trace.rows[row]
        return WorkloadRequest(
            at,
            prompt,
            output,
            DEFAULT,
            asked.priority,
            row,
            text,
            asked.service,
            asked.deadline_s,
            asked.target,
            parts=parts,
            program=program,
            pause_s=pause_s,
        )

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        record: dict[str, Any] = {"lengths": f"trace:{self.trace.name}"}
        if self.trace.part_tokens is not None:
            record["hash_tokens"] = self.trace.part_tokens
        if self.arrivals is None or self.trace.has_arrivals:
            record |= {"arrivals": "trace", "rate_rps": self._recorded_rate(), "speedup": self.speedup}
        else:
            record |= {"arrivals": self.arrivals.name, "rate_rps": rate_rps}
        return record | _extent(self, duration_s, seed, limit)

    def _recorded_rate(self) -> float | None:
        *_, last = self._as_recorded()
        return (len(self.trace.rows) - 1) / last.at if last.at else None


Classed = TypeVar("Classed", Synthetic, Replay)


def synthetic(lengths: str, arrivals: str, streams: Sequence[str] = (), prefix: str | None = None) -> Synthetic:
    """Create a workload from the texts of options. The main stream is named "default" and has the remaining share."""
    others = tuple(parse_stream(text) for text in streams)
    rest = 1 - sum(stream.share for stream in others)
    if rest < 1e-9:  # rounding error of shares that add up to 1
        raise ConfigError(f"the shares of further streams must add up to less than 1, got {1 - rest:g}")
    shared = None if prefix is None else parse_shared_prefix(prefix)
    main = Stream(DEFAULT, parse_lengths(lengths), parse_arrivals(arrivals), rest, prefix=shared)
    return Synthetic((main, *others))


def with_best_effort(workload: Classed, share: float) -> Classed:
    """Return the jobs in two streams by service class. A larger share only makes further jobs best-effort."""
    return replace(workload, best_effort=share)


def with_closed(workload: Classed, closed: Sequence[Closed]) -> Classed:
    return replace(workload, closed=tuple(closed))


def keys_of(workload: Workload) -> set[str]:
    streams = {stream.key for stream in workload.streams} if isinstance(workload, Synthetic) else {""}
    return streams | {closed.key for closed in workload.closed}


def _with_classes(
    jobs: Iterator[WorkloadRequest], best_effort: float | None, seed: int, index: int
) -> Iterator[WorkloadRequest]:
    if best_effort is None:
        return jobs
    chance = generator(seed, index, "class")
    classes = (
        ServiceClass.BEST_EFFORT if chance.random() < best_effort else ServiceClass.REAL_TIME for _ in repeat(None)
    )
    return (job._replace(stream=service.value, service=service) for job, service in zip(jobs, classes, strict=False))


def _check_best_effort(share: float | None, *, has_classes: bool = False) -> None:
    if share is not None and not 0 <= share <= 1:
        raise ConfigError(f"best_effort must be in [0, 1], got {share}")
    if share is not None and has_classes:
        raise ConfigError("best_effort and a stream of class best-effort exclude each other")


def _check_names(workload: Workload, streams: Sequence[str]) -> None:
    opened = streams if workload.best_effort is None else [*streams, *(service.value for service in ServiceClass)]
    names = [*opened, *(item.name for item in workload.closed)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the names of streams must differ, but {twice[0]!r} is named twice")


def _check_extent(workload: Workload, duration_s: float | None, limit: int | None) -> None:
    if workload.closed and duration_s is None:
        raise ConfigError("a closed stream needs duration_s (--duration): the seconds in which its jobs are submitted")
    if (duration_s is None) == (limit is None):
        raise ConfigError("one of duration_s and limit must be given, not both")
    if limit is None:
        in_bounds("duration_s", duration_s)
    elif limit < 1:
        raise ConfigError(f"limit must be at least 1 request, got {limit}")


def _cut(jobs: Iterator[WorkloadRequest], duration_s: float | None, limit: int | None) -> list[WorkloadRequest]:
    if duration_s is None:
        return list(islice(jobs, limit))
    return list(takewhile(lambda job: job.at < duration_s, jobs))


def _extent(workload: Workload, duration_s: float | None, seed: int, limit: int | None) -> dict[str, Any]:
    extent: dict[str, Any] = {"duration_s": duration_s, "seed": seed}
    if limit is not None:
        extent["limit"] = limit
    if workload.best_effort is not None:
        extent["best_effort"] = workload.best_effort
    if workload.closed:
        extent["closed"] = [item.describe() for item in workload.closed]
    return extent
