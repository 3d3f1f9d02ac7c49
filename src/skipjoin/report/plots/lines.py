from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skipjoin.config import ConfigError
from skipjoin.report.bound import Bound, MaximumRate, maximum_rate
from skipjoin.report.results import Record, rate_of

Warn = Callable[[str], None]
# Fields that always distinguish lines; others may depend on rate or seed.
_IDENTITY = ("model", "hardware", "driver", "workload.lengths", "workload.arrivals", "workload.trace")
_AXES = {"workload.rate_rps", "workload.seed", "workload.duration_s"}


class NothingToDrawError(ConfigError): ...


@dataclass(frozen=True, slots=True)
class Line:
    """Records of one system at all rates and seeds."""

    label: str
    index: int  # determines the line's look
    records: tuple[Record, ...]

    def by_rate(self) -> dict[float, list[Record]]:
        rates: dict[float, list[Record]] = defaultdict(list)
        for record in self.records:
            if (rate := rate_of(record)) is not None:
                rates[rate].append(record)
        return dict(sorted(rates.items()))


def lines_of(records: Sequence[Record]) -> list[Line]:
    features = [_features(record) for record in records]
    names = _differing(_IDENTITY, features) + _telling(records, features)
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record, found in zip(records, features, strict=True):
        groups[(record["recipe"], *(_worded(name, found.get(name)) for name in names))].append(record)
    return [
        Line(", ".join(filter(None, key)), index, tuple(group)) for index, (key, group) in enumerate(groups.items())
    ]


def usable(kind: str, lines: Iterable[Line], check: Callable[[Record], object], warn: Warn) -> list[Line]:
    kept, warnings, reason = [], [], "there are no records"
    for line in lines:
        good, bad = [], defaultdict(list)
        for record in line.records:
            try:
                check(record)
            except ConfigError as error:
                reason = str(error)
                bad[reason].append(record)
            else:
                good.append(record)
        for why, records in bad.items():
            rates = ", ".join(dict.fromkeys(_named(rate_of(record)) for record in records))
            count = f"{len(records)} of {len(line.records)} records"
            warnings.append(f"{kind}: left out {count} of {line.label}, rate {rates}: {why}")
        if good:
            kept.append(replace(line, records=tuple(good)))
    if not kept:
        raise NothingToDrawError(f"{kind}: no record can be used: {reason}")
    for warning in warnings:
        warn(warning)
    return kept


def at_one_rate(
    kind: str, lines: Sequence[Line], rate_rps: float | None, warn: Warn
) -> tuple[float | None, list[Line]]:
    if rate_rps is None:
        common = set.intersection(*(set(map(rate_of, line.records)) for line in lines))
        if not common:
            raise NothingToDrawError(f"{kind}: no rate was measured for every line; choose a rate of {_rates(lines)}")
        rate_rps = max(common, key=lambda rate: -math.inf if rate is None else rate)
    found = []
    for line in lines:
        records = tuple(record for record in line.records if same_rate(rate_of(record), rate_rps))
        if records:
            found.append(replace(line, records=records))
        else:
            warn(f"{kind}: left out {line.label}: not measured at rate {_named(rate_rps)}")
    if not found:
        raise NothingToDrawError(f"{kind}: nothing to draw at rate {_named(rate_rps)}; choose one of {_rates(lines)}")
    return rate_rps, found


def same_rate(one: float | None, other: float | None) -> bool:
    return one is other if one is None or other is None else math.isclose(one, other, rel_tol=1e-6)


def maximum_rates(lines: Sequence[Line], bound: Bound, warn: Warn) -> dict[str, MaximumRate | None]:
    def need(record: Record) -> None:
        need_rate(record)
        bound.value(record)

    kept = usable("largest rate", lines, need, warn)
    return {line.label: maximum_rate(line.by_rate(), bound) for line in kept}


def need_rate(record: Record) -> None:
    if rate_of(record) is None:
        raise ConfigError("workload.rate_rps is null")


def _named(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"


def _rates(lines: Iterable[Line]) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted({rate for line in lines for rate in line.by_rate()}))


def _features(record: Record) -> dict[str, str]:
    found: dict[str, Any] = {name: record[name] for name in ("model", "hardware", "driver")}
    found |= {f"workload.{key}": value for key, value in record["workload"].items()}
    settings = (record.get("recipe_params") or {}) | (record.get("settings") or {})
    found |= {f"settings.{key}": value for key, value in settings.items()}
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in found.items()
        if name not in _AXES and value is not None
    }


def _differing(names: Iterable[str], features: Sequence[Mapping[str, str]]) -> list[str]:
    return [name for name in names if len({found.get(name) for found in features}) > 1]


def _telling(records: Sequence[Record], features: Sequence[Mapping[str, str]]) -> list[str]:
    alike: dict[tuple[Any, ...], list[Mapping[str, str]]] = defaultdict(list)
    for record, found in zip(records, features, strict=True):
        identity = [found.get(name) for name in _IDENTITY]
        alike[(record["recipe"], rate_of(record), record["workload"].get("seed"), *identity)].append(found)
    names = dict.fromkeys(name for found in features for name in found if name not in _IDENTITY)
    return [name for name in names if any(_differing([name], group) for group in alike.values())]


def _worded(name: str, value: str | None) -> str:
    if value is None:
        return ""
    return value if name in _IDENTITY else f"{name.partition('.')[2]}={value}"
