from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from skipjoin.config import ConfigError
from skipjoin.report.numbers import number
from skipjoin.report.results import Record, is_number

_OPERATORS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_BOUND = re.compile(r"\s*([^\s<>=]+)\s*(<=|>=|<|>)\s*([^\s<>=]+)\s*")


OBJECTIVES_HINT = (
    ", because the requests had no objective for it: set --slo-ttft, --slo-tpot, --slo-jct, --slo-scale or "
    "--slo-jct-scale, or ttft_s, tpot_s or jct_s in a trace"
)


@dataclass(frozen=True, slots=True)
class Bound:
    field: str
    operator: str
    limit: float

    def value(self, record: Record) -> float:
        return field_value(record, self.field)

    def allows(self, value: float) -> bool:
        return bool(_OPERATORS[self.operator](value, self.limit))

    def __str__(self) -> str:
        return f"{self.field}{self.operator}{self.limit:g}"


@dataclass(frozen=True, slots=True)
class Bounds:
    parts: tuple[Bound, ...]

    def hold(self, records: Sequence[Record]) -> bool:
        # All are evaluated, so that a field that the records lack is an error wherever it stands.
        means = [fmean(map(bound.value, records)) for bound in self.parts]
        return all(bound.allows(mean) for bound, mean in zip(self.parts, means, strict=True))

    def maximum_rate(self, points: Mapping[float, Sequence[Record]]) -> MaximumRate | None:
        found = [maximum_rate(points, bound) for bound in self.parts]
        rates = [rate for rate in found if rate is not None]
        lowest = min(rates, key=lambda rate: (rate.rate_rps, rate.at_least), default=None)
        return lowest if len(rates) == len(found) else None

    def minimum_replicas(self, points: Mapping[int, Sequence[Record]]) -> int | None:
        found = [minimum_replicas(points, bound) for bound in self.parts]
        sizes = [size for size in found if size is not None]
        return max(sizes) if len(sizes) == len(found) else None

    def __str__(self) -> str:
        return " and ".join(map(str, self.parts))


@dataclass(frozen=True, slots=True)
class MaximumRate:
    rate_rps: float
    at_least: bool

    def __str__(self) -> str:
        return f"≥ {number(self.rate_rps)}" if self.at_least else number(self.rate_rps)


def parse_bound(text: str) -> Bound:
    match = _BOUND.fullmatch(text)
    if match is None:
        raise ConfigError(f"bound must read FIELD<=NUMBER, with <=, >=, < or >, got {text!r}")
    field, sign, limit = match.groups()
    try:
        number = float(limit)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"bound {text!r}: the limit must be a finite number, got {limit!r}")
    return Bound(field, sign, number)


def field_value(record: Record, field: str) -> float:
    value: Any = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            raise ConfigError(f"the results have no field {field}{_nearest(record, field)}")
        value = value[key]
    if value is None:
        raise ConfigError(f"{field} is null{OBJECTIVES_HINT if _needs_objectives(field) else ''}")
    if not is_number(value):
        raise ConfigError(f"{field} is not a number{_nearest(record, field)}")
    return float(value)


def needs_objectives(bounds: Bounds) -> str | None:
    return next((bound.field for bound in bounds.parts if _needs_objectives(bound.field)), None)


def _needs_objectives(field: str) -> bool:
    return "slo" in field.split(".")


def maximum_rate(points: Mapping[float, Sequence[Record]], bound: Bound) -> MaximumRate | None:
    """Return the maximum rate at which the mean over seeds satisfies the bound, interpolated, or None."""
    means = [(rate, fmean(map(bound.value, points[rate]))) for rate in sorted(points)]
    if not means or not bound.allows(means[0][1]):
        return None
    for (rate, value), (next_rate, next_value) in pairwise(means):
        if not bound.allows(next_value):
            crossing = (bound.limit - value) / (next_value - value)
            return MaximumRate(rate + crossing * (next_rate - rate), at_least=False)
    return MaximumRate(means[-1][0], at_least=True)


def minimum_replicas(points: Mapping[int, Sequence[Record]], bound: Bound) -> int | None:
    found = None
    for replicas in sorted(points, reverse=True):
        if not bound.allows(fmean(map(bound.value, points[replicas]))):
            break
        found = replicas
    return found


def _nearest(record: Record, field: str) -> str:
    names = fields_of(record)
    # If the name is an object's, its fields are the candidates.
    near = [name for name in names if name.startswith(f"{field}.")] or difflib.get_close_matches(field, names)
    if near:
        return f"; nearest: {', '.join(near)}"
    return f"; they have {', '.join(names)}" if names else ""


def fields_of(record: Record) -> list[str]:
    return sorted(_numeric_fields(record, ""))


def _numeric_fields(record: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _numeric_fields(value, f"{prefix}{key}.")
        elif value is None or is_number(value):
            yield prefix + key
