"""Workloads: requests with arrival times and lengths, drawn from distributions or replayed from a trace."""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat, takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

from skipjoin.bench.arrivals import Arrivals, parse_arrivals
from skipjoin.bench.fields import in_bounds, number
from skipjoin.bench.lengths import Lengths, parse_lengths
from skipjoin.bench.trace import Trace
from skipjoin.config import ConfigError, unknown

DEFAULT = "default"
INTERACTIVE, BEST_EFFORT = ("interactive", 0), ("best-effort", 10)
STREAM_FIELDS = ("name", "lengths", "arrivals", "share", "priority")


class WorkloadRequest(NamedTuple):
    """A request to send. at: seconds from the start. stream: its class in the record. priority: lower is earlier.

    row: of the trace that it is from, from 0; None: from none. prompt: its text there; None: there is none.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    stream: str
    priority: int
    row: int | None = None
    prompt: str | None = None


class Workload(Protocol):
    """Requests over time. The same arguments give the same jobs, on every machine.

    best_effort: the share of jobs in class "best-effort", the others being "interactive"; None: no classes.
    """

    @property
    def best_effort(self) -> float | None: ...

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        """Jobs by time: those before `duration_s`, or the first `limit`. Raises `ConfigError`.

        A longer duration or a higher limit adds jobs at the end and changes none before.
        """
        ...

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        """The `workload` object of a result record: the arguments of `draw` and the workload."""
        ...


@dataclass(frozen=True)
class Stream:
    """Jobs of one kind. share: of the total rate. priority: lower is earlier."""

    name: str
    lengths: Lengths
    arrivals: Arrivals
    share: float = 1.0
    priority: int = 0

    def __post_init__(self) -> None:
        in_bounds(f"share of stream {self.name!r}", self.share, most=1)

    def jobs(self, rate_rps: float, seed: int, index: int) -> Iterator[WorkloadRequest]:
        """Endless jobs of this stream, number `index`, whose rate is its share of `rate_rps`.

        The k-th job has the same lengths at every rate.
        """
        lengths = _generator(seed, index, "lengths")
        for time in self.arrivals.times(_generator(seed, index, "arrivals")):
            prompt, output = self.lengths.draw(lengths)
            yield WorkloadRequest(time / rate_rps / self.share, prompt, output, self.name, self.priority)


@dataclass(frozen=True)
class Synthetic:
    """Jobs drawn from distributions. streams: their shares add up to 1 and their names differ."""

    streams: tuple[Stream, ...]
    best_effort: float | None = None

    def __post_init__(self) -> None:
        _check_best_effort(self.best_effort)
        total = sum(stream.share for stream in self.streams)
        if not math.isclose(total, 1):
            raise ConfigError(f"the shares of the streams must add up to 1, got {total:g}")
        names = [stream.name for stream in self.streams]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"the names of streams must differ, but {twice[0]!r} is named twice")

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        """As in `Workload`. One of `duration_s` and `limit` must be given."""
        rate = in_bounds("rate_rps", rate_rps)
        _check_extent(duration_s, limit)
        streams = (
            _with_classes(stream.jobs(rate, seed, index), self.best_effort, seed, index)
            for index, stream in enumerate(self.streams)
        )
        return _cut(heapq.merge(*streams, key=lambda job: job.at), duration_s, limit)

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        """As in `Workload`; includes `streams` when there are several."""
        record: dict[str, Any] = {
            "lengths": " + ".join(stream.lengths.name for stream in self.streams),
            "arrivals": " + ".join(stream.arrivals.name for stream in self.streams),
            "rate_rps": rate_rps,
            **_extent(self, duration_s, seed, limit),
        }
        if len(self.streams) > 1:
            record["streams"] = [
                {
                    "name": stream.name,
                    "lengths": stream.lengths.name,
                    "arrivals": stream.arrivals.name,
                    "share": stream.share,
                    "priority": stream.priority,
                }
                for stream in self.streams
            ]
        return record


@dataclass(frozen=True)
class Replay:
    """The requests of a trace, at their recorded times or, if it has none, with the arrivals of `arrivals`.

    speedup: divides the times of a trace. Its first request arrives at 0. Without times in the trace, rows follow each
    other from a row chosen by the seed, the first row after the last, at `rate_rps`.
    """

    trace: Trace
    speedup: float = 1.0
    arrivals: Arrivals | None = None
    best_effort: float | None = None

    def __post_init__(self) -> None:
        in_bounds("speedup", self.speedup)
        _check_best_effort(self.best_effort)
        if not self.trace.has_arrivals and self.arrivals is None:
            raise ConfigError(f"{self.trace.name} has no arrival times: give a pattern of arrivals")
        if not self.trace.has_arrivals and self.speedup != 1:
            raise ConfigError(f"speedup needs a trace with arrival times, and {self.trace.name} has none")

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        """As in `Workload`. With neither `duration_s` nor `limit` every row is used once.

        rate_rps: ignored where the trace has arrival times, which also end the jobs with its last row.
        """
        rows = len(self.trace.rows)
        if duration_s is None and limit is None:
            limit = rows
        _check_extent(duration_s, limit)
        if not self.trace.has_arrivals:
            jobs = self._at_rate(in_bounds("rate_rps", rate_rps), seed)
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
        row = int(_generator(seed, 0, "offset").random() * rows)
        for time in self.arrivals.times(_generator(seed, 0, "arrivals")):
            yield self._job(row, time / rate_rps)
            row = (row + 1) % rows

    def _job(self, row: int, at: float) -> WorkloadRequest:
        _, prompt, output, text = self.trace.rows[row]
        return WorkloadRequest(at, prompt, output, DEFAULT, 0, row, text)

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        """As in `Workload`; for a trace with arrival times `rate_rps` is the mean rate of the whole trace."""
        record: dict[str, Any] = {"lengths": f"trace:{self.trace.name}"}
        if self.arrivals is None or self.trace.has_arrivals:
            record |= {"arrivals": "trace", "rate_rps": self._recorded_rate(), "speedup": self.speedup}
        else:
            record |= {"arrivals": self.arrivals.name, "rate_rps": rate_rps}
        return record | _extent(self, duration_s, seed, limit)

    def _recorded_rate(self) -> float | None:
        """Mean arrivals per second; None if all come at once."""
        *_, last = self._as_recorded()
        return (len(self.trace.rows) - 1) / last.at if last.at else None


Classed = TypeVar("Classed", Synthetic, Replay)


def synthetic(lengths: str, arrivals: str, streams: Sequence[str] = ()) -> Synthetic:
    """A workload from the texts of options: its main stream and further ones, in `streams`, which take shares of its
    rate.

    The main stream is named "default" and has priority 0 and the remaining share. Raises `ConfigError`.
    """
    others = tuple(parse_stream(text) for text in streams)
    rest = 1 - sum(stream.share for stream in others)
    if rest < 1e-9:  # the rounding of shares that add up to 1
        raise ConfigError(f"the shares of further streams must add up to less than 1, got {1 - rest:g}")
    return Synthetic((Stream(DEFAULT, parse_lengths(lengths), parse_arrivals(arrivals), rest), *others))


def parse_stream(text: str) -> Stream:
    """A stream from `name=batch,lengths=uniform:512-1024,32-128,arrivals=poisson,share=0.5,priority=10`.

    A comma separates fields if a word and = follow it; other commas belong to the field. name, lengths and share are
    required; arrivals defaults to poisson and priority to 0. Raises `ConfigError`.
    """
    fields: dict[str, str] = {}
    for part in re.split(r",(?=\s*\w+\s*=)", text):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"stream must consist of KEY=VALUE fields, got {part!r}")
        if key not in STREAM_FIELDS:
            raise unknown("stream", key, STREAM_FIELDS)
        if key in fields:
            raise ConfigError(f"stream: {key} is given twice")
        fields[key] = value
    for key in ("name", "lengths", "share"):
        if not fields.get(key):
            raise ConfigError(f"stream needs {key}=, got {text!r}")
    try:
        priority = int(fields.get("priority", "0"))
    except ValueError:
        raise ConfigError(f"stream: priority must be an integer, got {fields['priority']!r}") from None
    return Stream(
        fields["name"],
        parse_lengths(fields["lengths"]),
        parse_arrivals(fields.get("arrivals", "poisson")),
        number("stream: share", fields["share"], most=1),
        priority,
    )


def with_best_effort(workload: Classed, share: float) -> Classed:
    """The same jobs in two classes: a share of each stream's is "best-effort" with priority 10, the rest
    "interactive" with priority 0. A larger share only adds to the best-effort jobs. Raises `ConfigError`."""
    return replace(workload, best_effort=share)


def _generator(seed: int, stream: int, purpose: str) -> random.Random:
    # Seeded by a text, whose hash is the same in every process; neighbouring seeds give unrelated numbers.
    return random.Random(f"{seed}/{stream}/{purpose}")


def _with_classes(
    jobs: Iterator[WorkloadRequest], best_effort: float | None, seed: int, index: int
) -> Iterator[WorkloadRequest]:
    if best_effort is None:
        return jobs
    chance = _generator(seed, index, "class")
    classes = (BEST_EFFORT if chance.random() < best_effort else INTERACTIVE for _ in repeat(None))
    return (job._replace(stream=name, priority=priority) for job, (name, priority) in zip(jobs, classes, strict=False))


def _check_best_effort(share: float | None) -> None:
    if share is not None and not 0 <= share <= 1:
        raise ConfigError(f"best_effort must be in [0, 1], got {share}")


def _check_extent(duration_s: float | None, limit: int | None) -> None:
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


def _extent(
    workload: Workload, duration_s: float | None, seed: int, limit: int | None
) -> dict[str, float | int | None]:
    """The fields of a description that all workloads share."""
    extent: dict[str, float | int | None] = {"duration_s": duration_s, "seed": seed}
    if limit is not None:
        extent["limit"] = limit
    if workload.best_effort is not None:
        extent["best_effort"] = workload.best_effort
    return extent
