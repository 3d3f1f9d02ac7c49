"""Runs of the figures of papers' evaluations: grids of cells, searches for rates, and selections of records."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from papers.recipes import label_of
from skipjoin.observe.record import NO_SLO, Record, Slo
from skipjoin.report.bound import MaximumRate, field_value, maximum_rate, parse_bound
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.sweep import Grid, RateSearch, SweepPlan, sweep
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import Synthetic, Workload, synthetic

# Default seconds of arrivals, and default number of seeds.
DURATION_S, SEEDS = 300.0, 3
# Duration of a saturated run that measures a capacity.
_SATURATED_S = 100.0
# Factor by which a grid's highest rate is raised until a bound breaks, and how often at most.
_RISE, _MAX_RISES = 1.3, 6
# Interval of progress messages.
_NOTICE_S = 5.0

Result = dict[str, Any]

# Charge each step the mean CPU time of the decisions in a first run of the same cell.
MEASURED = "measured"
# Charge of that first run, so that it decides every step as the second one does.
_PROBE_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a figure.

    Attributes:
        out: Folder of the results.
        quick: Measure one seed and every other rate.
        jobs: Number of processes.
        duration_s: Seconds of arrivals, of which a figure may take multiples.
        lasting_s: Seconds of arrivals of every run, whatever the figure would take; None leaves it to the figure.
        seed_count: Number of seeds, whatever the figure would take; None leaves it to the figure.
        decisions: Seconds of each decision before its step, or `MEASURED`; None leaves it to the figure, and most
            figures charge nothing.
    """

    out: Path
    quick: bool = False
    jobs: int = 2
    duration_s: float = DURATION_S
    lasting_s: float | None = None
    seed_count: int | None = None
    decisions: float | str | None = None

    def seeds(self, full: int = SEEDS) -> tuple[int, ...]:
        return tuple(range(self.seed_count or (1 if self.quick else full)))

    def some(self, values: Sequence[float]) -> Sequence[float]:
        return values[-1::-2][::-1] if self.quick else values

    def charging(self) -> Options:
        """Return the options of a figure that charges measured decisions unless told otherwise."""
        return replace(self, decisions=MEASURED) if self.decisions is None else self


def with_kv_gib(of: System, kv_gib: float) -> System:
    """Return the system with another KV pool, which may exceed the memory of its GPU."""
    return replace(of, kv_blocks=int(kv_gib * 2**30) // of.block_bytes)


def poisson(lengths: str) -> Synthetic:
    return synthetic(lengths, "poisson")


def cells(
    of: System,
    workload: Workload,
    rates: Sequence[float],
    options: Options,
    *,
    seeds: Sequence[int] | None = None,
    slo: Slo = NO_SLO,
) -> list[Cell]:
    return [
        Cell(of, workload, Extent(rate, options.duration_s, seed), slo)
        for rate in rates
        for seed in (options.seeds() if seeds is None else seeds)
    ]


def slim(record: Record) -> Record:
    """Return a record without its curves, but with the recipe's label and the longest completion time."""
    kept = {name: value for name, value in record.items() if name not in ("series", "quantiles")}
    return kept | {
        "recipe": label_of(record["recipe"]),
        "longest_jct_s": max(record["quantiles"]["jct_s"], default=None),
    }


class Kept:
    """Sweep plan that keeps the records of its cells, sorted by rate and seed."""

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._records: list[Record] = []

    def first(self) -> Sequence[Cell]:
        return list(self._plan.first())

    def then(self, cell: Cell, record: Record) -> Sequence[Cell]:
        self._records.append(slim(record))
        return list(self._plan.then(cell, record))

    @property
    def records(self) -> list[Record]:
        return sorted(self._records, key=lambda record: (record["workload"]["rate_rps"], record["workload"]["seed"]))


def grid(found: Sequence[Cell]) -> Kept:
    return Kept(Grid(found))


class Rising(Kept):
    """Grid whose highest rate is raised until its mean over seeds breaks a bound, or at most `_MAX_RISES` times."""

    def __init__(self, found: Sequence[Cell], bound: str) -> None:
        self._bound = parse_bound(bound)
        self._highest = max(_rate(cell) for cell in found)
        self._seeds = [cell for cell in found if _rate(cell) == self._highest]
        self._rises = 0
        super().__init__(Grid(found))

    def then(self, cell: Cell, record: Record) -> Sequence[Cell]:
        more = list(super().then(cell, record))
        done = [one for one in self._records if one["workload"]["rate_rps"] == self._highest]
        is_last = _rate(cell) == self._highest and len(done) == len(self._seeds)
        if not is_last or self._rises == _MAX_RISES or not self._bound.allows(mean(done, self._bound.field)):
            return more
        self._rises += 1
        self._highest = round(self._highest * _RISE, 3)
        return [*more, *(replace(one, extent=replace(one.extent, rate_rps=self._highest)) for one in self._seeds)]


def _rate(cell: Cell) -> float:
    assert cell.extent.rate_rps is not None
    return cell.extent.rate_rps


class Search(Kept):
    """Search for the largest rate whose mean over seeds keeps a bound, by bisection to 2 %.

    The search starts from one cell per seed at the first rate.
    """

    def __init__(self, found: Sequence[Cell], bound: str) -> None:
        self._bound = parse_bound(bound)
        super().__init__(RateSearch(found, self._bound))

    @property
    def rate(self) -> MaximumRate | None:
        return maximum_rate(by_rate(self.records), self._bound)

    def tried(self) -> list[list[float]]:
        """Return the rates and their means over seeds."""
        return [[rate, mean(some, self._bound.field)] for rate, some in by_rate(self.records).items()]


def probing(of: System) -> System:
    """Return the system with decisions that are made for every step and take no time."""
    return replace(of, decision_s=_PROBE_S)


def charged(of: System, record: Record) -> System:
    """Return the system with decisions that take the mean CPU time of those in a record."""
    return replace(of, decision_s=record["decision_ms"]["mean"] / 1000)


class _Charging:
    """Plan whose decisions take time, given in seconds or measured."""

    def __init__(self, plan: SweepPlan, decisions: float | str) -> None:
        self._plan = plan
        self._decisions = decisions

    def first(self) -> Sequence[Cell]:
        return list(map(self._with_decisions, self._plan.first()))

    def then(self, cell: Cell, record: Record) -> Sequence[Cell]:
        if self._decisions == MEASURED and cell.system.decision_s == _PROBE_S:
            return [replace(cell, system=charged(cell.system, record))]
        return list(map(self._with_decisions, self._plan.then(cell, record)))

    def _with_decisions(self, cell: Cell) -> Cell:
        of = cell.system
        is_measured = isinstance(self._decisions, str)
        return replace(cell, system=probing(of) if is_measured else replace(of, decision_s=self._decisions))


def run_plans(name: str, plans: Sequence[SweepPlan], options: Options) -> None:
    """Run all plans with the options' decisions, and report their progress on standard error."""
    if (decisions := options.decisions) is not None:
        plans = [_Charging(plan, decisions) for plan in plans]
    sweep(plans, options.jobs, _Notices(name))


class _Notices:
    """Sweep watcher that reports the number of finished runs periodically."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = self._done = 0
        self._start = self._said = time.monotonic()

    def begun(self, number: int, cell: Cell) -> None:
        self._begun += 1

    def share(self, number: int, share: float) -> None:
        pass

    def done(self, number: int, record: Record) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said >= _NOTICE_S or self._done == self._begun:
            self._said = now
            text = f"{self._name}: {self._done} of {self._begun} runs, {now - self._start:.0f} s"
            print(text, file=sys.stderr, flush=True)


def capacities(name: str, pairs: Sequence[tuple[System, Synthetic]], options: Options) -> list[float]:
    """Return the capacity of each system: tokens per second under saturation, divided by the mean output.

    A load of 1 is the capacity.
    """
    plans = []
    for of, workload in pairs:
        # An engine of these sizes generates fewer than 10,000 tokens per second.
        limit = max(100, round(10_000 * _SATURATED_S / workload.streams[0].lengths.mean()[1]))
        plans.append(grid([Cell(of, workload, Extent(1e5, None, 0, limit, _SATURATED_S))]))
    run_plans(f"{name}, capacity", plans, options)
    return [
        plan.records[0]["throughput_tps"] / workload.streams[0].lengths.mean()[1]
        for plan, (_, workload) in zip(plans, pairs, strict=True)
    ]


def result_of(name: str, options: Options) -> Result:
    """Return the recorded result of another figure, next to which this one's is written."""
    source = options.out.parent / name / "result.json"
    if not source.exists():
        raise SystemExit(f"this figure draws the runs of {name}, but {source} does not exist: run {name} first")
    found: Result = json.loads(source.read_text(encoding="utf-8"))
    return found


def by_rate(records: Sequence[Record]) -> dict[float, list[Record]]:
    """Group records by arrival rate in ascending order."""
    rates = sorted({record["workload"]["rate_rps"] for record in records})
    return {rate: [record for record in records if record["workload"]["rate_rps"] == rate] for rate in rates}


def mean(records: Sequence[Record], field: str) -> float:
    return fmean(field_value(record, field) for record in records)


def pick(records: Sequence[Record], **wanted: object) -> list[Record]:
    """Return the records whose labels, workload or settings have the wanted values."""

    def has(record: Record) -> bool:
        places = (record, record["workload"], record.get("settings", {}))
        return all(any(place.get(name) == value for place in places) for name, value in wanted.items())

    return [record for record in records if has(record)]
