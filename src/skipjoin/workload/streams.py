from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any

from skipjoin.config import ConfigError
from skipjoin.core.request import ServiceClass
from skipjoin.observe.requests import Kind
from skipjoin.workload.arrivals import Arrivals, parse_arrivals
from skipjoin.workload.fields import FieldTexts, in_bounds
from skipjoin.workload.lengths import Lengths, parse_lengths
from skipjoin.workload.prefixes import SharedPrefix, parse_shared_prefix
from skipjoin.workload.request import WorkloadRequest

STREAM_FIELDS = ("name", "lengths", "arrivals", "share", "priority", "class", "key", "prefix")
CLOSED_FIELDS = ("name", "lengths", "size", "mode", "priority", "class", "key", "prefix")
MAX_IN_FLIGHT = 1_000_000


class ClosedMode(StrEnum):
    BATCH = "batch"  # `size` jobs, once all earlier ones have finished (BROS section 7.1)
    REFILL = "refill"  # one job for each that finishes


@dataclass(frozen=True)
class JobSource:
    name: str
    lengths: Lengths
    _: KW_ONLY
    priority: int = 0
    service: ServiceClass = ServiceClass.REAL_TIME
    key: str = ""
    prefix: SharedPrefix | None = None

    @property
    def kind(self) -> Kind:
        return Kind(self.name, self.service)

    def job(self, at: float, lengths: random.Random, groups: random.Random) -> WorkloadRequest:
        prompt, output = self.lengths.draw(lengths)
        job = WorkloadRequest(at, prompt, output, self.name, self.priority, service=self.service, key=self.key)
        return job.after(self.prefix, groups)

    def described(self, **own: Any) -> dict[str, Any]:
        return {
            "name": self.name,
            "lengths": self.lengths.name,
            **own,
            "priority": self.priority,
            "service": self.service.value,
            **({"key": self.key} if self.key else {}),
            **({} if self.prefix is None else {"prefix": str(self.prefix)}),
        }


@dataclass(frozen=True)
class Closed(JobSource):
    """Closed-loop stream with at most `size` requests in flight, the first at 0."""

    size: int
    mode: ClosedMode = ClosedMode.BATCH

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_IN_FLIGHT:
            raise ConfigError(f"closed: size must be an integer in [1, {MAX_IN_FLIGHT}], got {self.size}")

    def jobs(self, seed: int, index: int) -> Iterator[WorkloadRequest]:
        """Yield jobs indefinitely, all with arrival 0. The k-th has the same lengths regardless of the system."""
        chance, groups = generator(seed, index, "closed"), generator(seed, index, "closed prefix")
        while True:
            yield self.job(0.0, chance, groups)

    def describe(self) -> dict[str, Any]:
        return self.described(size=self.size, mode=self.mode.value)


@dataclass(frozen=True)
class Stream(JobSource):
    arrivals: Arrivals
    share: float = 1.0

    def __post_init__(self) -> None:
        in_bounds(f"share of stream {self.name!r}", self.share, most=1)

    def jobs(self, rate_rps: float, seed: int, index: int) -> Iterator[WorkloadRequest]:
        """Yield jobs indefinitely, at the stream's share of `rate_rps`. The k-th has the same lengths at every rate."""
        lengths, groups = generator(seed, index, "lengths"), generator(seed, index, "prefix")
        for time in self.arrivals.times(generator(seed, index, "arrivals")):
            yield self.job(time / rate_rps / self.share, lengths, groups)

    def describe(self) -> dict[str, Any]:
        return self.described(arrivals=self.arrivals.name, share=self.share)


def parse_stream(text: str) -> Stream:
    """Parse a stream such as `name=batch,lengths=uniform:512-1024,32-128,share=0.5,class=best-effort`."""
    fields = FieldTexts("stream", text, known=STREAM_FIELDS, needed=("name", "lengths", "share"))
    return Stream(
        fields["name"],
        parse_lengths(fields["lengths"]),
        parse_arrivals(fields.get("arrivals", "poisson")),
        fields.number("share", most=1),
        **_shared(fields),
    )


def parse_closed(text: str) -> Closed:
    fields = FieldTexts("closed", text, known=CLOSED_FIELDS, needed=("name", "lengths", "size"))
    return Closed(
        fields["name"],
        parse_lengths(fields["lengths"]),
        fields.integer("size", 1),
        fields.choice("mode", ClosedMode.BATCH),
        **_shared(fields),
    )


def _shared(fields: FieldTexts) -> dict[str, Any]:
    return {
        "priority": fields.integer("priority", 0),
        "service": fields.choice("class", ServiceClass.REAL_TIME),
        "key": fields.get("key", ""),
        "prefix": parse_shared_prefix(fields["prefix"]) if "prefix" in fields else None,
    }


def generator(seed: int, stream: int, purpose: str) -> random.Random:
    # A text seed is hashed, equally in every process, so that adjacent seeds give unrelated numbers.
    return random.Random(f"{seed}/{stream}/{purpose}")
