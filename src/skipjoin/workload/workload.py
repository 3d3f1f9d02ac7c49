"""Workloads: requests with arrival times and lengths, drawn from distributions or replayed from a trace."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice, repeat, takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

from skipjoin.config import ConfigError
from skipjoin.core.request import NO_TARGET, ServiceClass, Target
from skipjoin.observe.requests import Kind
from skipjoin.workload.arrivals import Arrivals, parse_arrivals
from skipjoin.workload.fields import FieldTexts, in_bounds
from skipjoin.workload.lengths import Lengths, parse_lengths
from skipjoin.workload.prefixes import PromptParts, SharedPrefix, parse_shared_prefix
from skipjoin.workload.traces import Trace

DEFAULT = "default"
STREAM_FIELDS = ("name", "lengths", "arrivals", "share", "priority", "class", "key", "prefix")
CLOSED_FIELDS = ("name", "lengths", "size", "mode", "priority", "class", "key", "prefix")
MOST_IN_FLIGHT = 1_000_000


class ClosedMode(StrEnum):
    """When a closed stream submits its next jobs."""

    BATCH = "batch"  # all of them, when all of those before are over (BROS section 7.1)
    REFILL = "refill"  # one, when another one is over


class WorkloadRequest(NamedTuple):
    """A request to send. at: seconds from the start. stream: its class in the record. priority: lower is earlier.

    row: of the trace that it is from, from 0; None: from none. prompt: its text there; None: there is none.
    service: its service class. deadline_s: from its arrival; None: none. target: objectives of its own. key: of the
    API; requests of one key are one client's. parts: those of its prompt that others may begin with too; None: none is
    known.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    stream: str
    priority: int
    row: int | None = None
    prompt: str | None = None
    service: ServiceClass = ServiceClass.REAL_TIME
    deadline_s: float | None = None
    target: Target = NO_TARGET
    key: str = ""
    parts: PromptParts | None = None

    def after(self, prefix: SharedPrefix | None, chance: random.Random) -> WorkloadRequest:
        """The same request with a prompt that begins with a further prefix; None: with none."""
        if prefix is None:
            return self
        return self._replace(prompt_tokens=prefix.tokens + self.prompt_tokens, parts=prefix.draw(chance, self.stream))

    @property
    def kind(self) -> Kind:
        """What figures tell it apart by."""
        return Kind(self.stream, self.service)


@dataclass(frozen=True)
class Closed:
    """Jobs that are submitted when others of the stream end: of these, `size` are in flight at most.

    Its first jobs are submitted at 0 and its last ones before the end of the workload's duration. priority: lower is
    earlier. prefix: what prompts begin with besides their lengths.
    """

    name: str
    lengths: Lengths
    size: int
    mode: ClosedMode = ClosedMode.BATCH
    priority: int = 0
    service: ServiceClass = ServiceClass.REAL_TIME
    key: str = ""
    prefix: SharedPrefix | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MOST_IN_FLIGHT:
            raise ConfigError(f"closed: size must be an integer in [1, {MOST_IN_FLIGHT}], got {self.size}")

    @property
    def kind(self) -> Kind:
        """What figures tell its jobs apart by."""
        return Kind(self.name, self.service)

    def jobs(self, seed: int, index: int) -> Iterator[WorkloadRequest]:
        """Endless jobs of this closed stream, number `index`, at 0: the k-th job has the same lengths whatever system
        runs it, and however long the jobs before take."""
        chance, groups = _generator(seed, index, "closed"), _generator(seed, index, "closed prefix")
        while True:
            prompt, output = self.lengths.draw(chance)
            job = WorkloadRequest(0.0, prompt, output, self.name, self.priority, service=self.service, key=self.key)
            yield job.after(self.prefix, groups)

    def describe(self) -> dict[str, Any]:
        """Its entry in a result record."""
        return {
            "name": self.name,
            "lengths": self.lengths.name,
            "size": self.size,
            "mode": self.mode.value,
            "priority": self.priority,
            "service": self.service.value,
            **({"key": self.key} if self.key else {}),
            **_described(self.prefix),
        }


class Workload(Protocol):
    """Requests over time. The same arguments give the same jobs, on every machine.

    best_effort: the share of jobs that are best-effort, the others being real-time, in streams of these names; None:
    the streams are as they are. closed: the streams whose jobs follow on each other, which `draw` does not return.
    """

    @property
    def best_effort(self) -> float | None: ...

    @property
    def closed(self) -> tuple[Closed, ...]: ...

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        """Jobs by time: those before `duration_s`, or the first `limit`. Closed streams need `duration_s`, until which
        they submit jobs. Raises `ConfigError`.

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
    """Jobs of one kind. share: of the total rate. priority: lower is earlier. service: their class. prefix: what
    prompts begin with besides their lengths."""

    name: str
    lengths: Lengths
    arrivals: Arrivals
    share: float = 1.0
    priority: int = 0
    service: ServiceClass = ServiceClass.REAL_TIME
    key: str = ""
    prefix: SharedPrefix | None = None

    def __post_init__(self) -> None:
        in_bounds(f"share of stream {self.name!r}", self.share, most=1)

    def jobs(self, rate_rps: float, seed: int, index: int) -> Iterator[WorkloadRequest]:
        """Endless jobs of this stream, number `index`, whose rate is its share of `rate_rps`.

        The k-th job has the same lengths at every rate.
        """
        lengths, groups = _generator(seed, index, "lengths"), _generator(seed, index, "prefix")
        for time in self.arrivals.times(_generator(seed, index, "arrivals")):
            prompt, output = self.lengths.draw(lengths)
            at = time / rate_rps / self.share
            job = WorkloadRequest(at, prompt, output, self.name, self.priority, service=self.service, key=self.key)
            yield job.after(self.prefix, groups)

    def describe(self) -> dict[str, Any]:
        """Its entry in a result record."""
        return {
            "name": self.name,
            "lengths": self.lengths.name,
            "arrivals": self.arrivals.name,
            "share": self.share,
            "priority": self.priority,
            "service": self.service.value,
            **({"key": self.key} if self.key else {}),
            **_described(self.prefix),
        }


@dataclass(frozen=True)
class Synthetic:
    """Jobs drawn from distributions. streams: their shares add up to 1; the names of all streams differ."""

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
        """As in `Workload`. One of `duration_s` and `limit` must be given."""
        rate = in_bounds("rate_rps", rate_rps)
        _check_extent(self, duration_s, limit)
        streams = (
            _with_classes(stream.jobs(rate, seed, index), self.best_effort, seed, index)
            for index, stream in enumerate(self.streams)
        )
        return _cut(heapq.merge(*streams, key=lambda job: job.at), duration_s, limit)

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        """As in `Workload`; includes `streams` when there are several, or one with a prefix."""
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
    """The requests of a trace, at their recorded times or, if it has none, with the arrivals of `arrivals`.

    speedup: divides the times of a trace. Its first request arrives at 0. Without times in the trace, rows follow each
    other from a row chosen by the seed, the first row after the last, at `rate_rps`.
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
        _check_extent(self, duration_s, limit)
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
        _, prompt, output, text, asked, parts = self.trace.rows[row]
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
        )

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        """As in `Workload`; for a trace with arrival times `rate_rps` is the mean rate of the whole trace."""
        record: dict[str, Any] = {"lengths": f"trace:{self.trace.name}"}
        if self.trace.part_tokens is not None:
            record["hash_tokens"] = self.trace.part_tokens
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


def synthetic(lengths: str, arrivals: str, streams: Sequence[str] = (), prefix: str | None = None) -> Synthetic:
    """A workload from the texts of options: its main stream and further ones, in `streams`, which take shares of its
    rate.

    The main stream is named "default" and has priority 0 and the remaining share. prefix: of its prompts, as in
    `parse_shared_prefix`; None: none. Raises `ConfigError`.
    """
    others = tuple(parse_stream(text) for text in streams)
    rest = 1 - sum(stream.share for stream in others)
    if rest < 1e-9:  # the rounding of shares that add up to 1
        raise ConfigError(f"the shares of further streams must add up to less than 1, got {1 - rest:g}")
    shared = None if prefix is None else parse_shared_prefix(prefix)
    main = Stream(DEFAULT, parse_lengths(lengths), parse_arrivals(arrivals), rest, prefix=shared)
    return Synthetic((main, *others))


def parse_stream(text: str) -> Stream:
    """A stream from `name=batch,lengths=uniform:512-1024,32-128,arrivals=poisson,share=0.5,class=best-effort`.

    A comma separates fields if a word and = follow it; other commas belong to the field. name, lengths and share are
    required; arrivals defaults to poisson, priority to 0 and class to real-time. Streams without key= are one
    client's. prefix=1000:20 is as in `parse_shared_prefix`. Raises `ConfigError`.
    """
    fields = FieldTexts("stream", text, known=STREAM_FIELDS, needed=("name", "lengths", "share"))
    return Stream(
        fields["name"],
        parse_lengths(fields["lengths"]),
        parse_arrivals(fields.get("arrivals", "poisson")),
        fields.number("share", most=1),
        fields.integer("priority", 0),
        fields.choice("class", ServiceClass.REAL_TIME),
        fields.get("key", ""),
        _prefix_of(fields),
    )


def parse_closed(text: str) -> Closed:
    """A closed stream from `name=be,lengths=uniform:512-1024,32-128,size=128,mode=batch,class=best-effort`.

    Fields are separated as in `parse_stream`. name, lengths and size are required; mode defaults to batch, priority to
    0 and class to real-time. prefix=1000:20 is as in `parse_shared_prefix`. Raises `ConfigError`.
    """
    fields = FieldTexts("closed", text, known=CLOSED_FIELDS, needed=("name", "lengths", "size"))
    return Closed(
        fields["name"],
        parse_lengths(fields["lengths"]),
        fields.integer("size", 1),
        fields.choice("mode", ClosedMode.BATCH),
        fields.integer("priority", 0),
        fields.choice("class", ServiceClass.REAL_TIME),
        fields.get("key", ""),
        _prefix_of(fields),
    )


def _prefix_of(fields: FieldTexts) -> SharedPrefix | None:
    return parse_shared_prefix(fields["prefix"]) if "prefix" in fields else None


def _described(prefix: SharedPrefix | None) -> dict[str, Any]:
    return {} if prefix is None else {"prefix": str(prefix)}


def with_best_effort(workload: Classed, share: float) -> Classed:
    """The same jobs in two streams: a share of each stream's is best-effort and the rest real-time, and the streams
    are called so. A larger share only adds to the best-effort jobs. Raises `ConfigError`."""
    return replace(workload, best_effort=share)


def with_closed(workload: Classed, closed: Sequence[Closed]) -> Classed:
    """The same jobs beside those of closed streams. Raises `ConfigError` for names that do not differ."""
    return replace(workload, closed=tuple(closed))


def keys_of(workload: Synthetic | Replay) -> set[str]:
    """The keys of its jobs; an empty one stands for none."""
    streams = {stream.key for stream in workload.streams} if isinstance(workload, Synthetic) else {""}
    return streams | {closed.key for closed in workload.closed}


def _generator(seed: int, stream: int, purpose: str) -> random.Random:
    # Seeded by a text, whose hash is the same in every process; neighbouring seeds give unrelated numbers.
    return random.Random(f"{seed}/{stream}/{purpose}")


def _with_classes(
    jobs: Iterator[WorkloadRequest], best_effort: float | None, seed: int, index: int
) -> Iterator[WorkloadRequest]:
    if best_effort is None:
        return jobs
    chance = _generator(seed, index, "class")
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
    """Raise `ConfigError` for names that do not differ. streams: the names of those that are not closed."""
    opened = streams if workload.best_effort is None else [*streams, *(service.value for service in ServiceClass)]
    names = [*opened, *(one.name for one in workload.closed)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"the names of streams must differ, but {twice[0]!r} is named twice")


def _check_extent(workload: Workload, duration_s: float | None, limit: int | None) -> None:
    if workload.closed and duration_s is None:
        raise ConfigError("a closed stream needs duration_s: the seconds in which its jobs are submitted")
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
    """The fields of a description that all workloads share."""
    extent: dict[str, Any] = {"duration_s": duration_s, "seed": seed}
    if limit is not None:
        extent["limit"] = limit
    if workload.best_effort is not None:
        extent["best_effort"] = workload.best_effort
    if workload.closed:
        extent["closed"] = [one.describe() for one in workload.closed]
    return extent
