"""What the figures of papers' evaluations share: running many cells, searches for rates."""

from __future__ import annotations

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
from skipjoin.sim.experiments.simulation import Cell, Extent
from skipjoin.sim.experiments.sweep import Grid, RateSearch, SweepPlan, sweep
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import Synthetic, Workload, synthetic

# Seconds in which requests arrive, and seeds of a point, unless a figure says otherwise.
DURATION_S, SEEDS = 300.0, 3
# Where a saturated system is watched for its capacity.
_SATURATED_S = 100.0
_NOTICE_S = 5.0

Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much of a figure is measured, and where to.

    out: the figure's folder. quick: one seed and every other rate. jobs: processes. duration_s: in which requests
    arrive.
    """

    out: Path
    quick: bool = False
    jobs: int = 2
    duration_s: float = DURATION_S

    def seeds(self, full: int = SEEDS) -> tuple[int, ...]:
        """The seeds of each point; full: how many there are if it is not to be quick."""
        return tuple(range(1 if self.quick else full))

    def some(self, values: Sequence[float]) -> Sequence[float]:
        """The values, or every other one with the last."""
        return values[-1::-2][::-1] if self.quick else values


# -- what runs --------------------------------------------------------------------------------------------


def with_kv_gib(of: System, kv_gib: float) -> System:
    """The system with another KV pool, also one that is larger than its GPU."""
    return replace(of, kv_blocks=int(kv_gib * 2**30) // of.block_bytes)


def poisson(lengths: str) -> Synthetic:
    """Lengths by name, arriving at random."""
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
    """A cell for each rate and seed; seeds: None: all."""
    return [
        Cell(of, workload, Extent(rate, options.duration_s, seed), slo)
        for rate in rates
        for seed in (options.seeds() if seeds is None else seeds)
    ]


def slim(record: Record) -> Record:
    """A record without its curves and what only they need, with the recipe's label and the longest completion time."""
    kept = {name: value for name, value in record.items() if name not in ("series", "quantiles")}
    return kept | {
        "recipe": label_of(record["recipe"]),
        "longest_jct_s": max(record["quantiles"]["jct_s"], default=None),
    }


class Kept:
    """A plan that keeps the records of its cells, in the order of rate and seed."""

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
    """A plan of fixed cells."""
    return Kept(Grid(found))


class Search(Kept):
    """A search for the largest rate that keeps a bound, by bisection to 2 %; the bound is on the mean over seeds.

    found: one cell per seed, at the rate to start from.
    """

    def __init__(self, found: Sequence[Cell], bound: str) -> None:
        self._bound = parse_bound(bound)
        super().__init__(RateSearch(found, self._bound))

    @property
    def rate(self) -> MaximumRate | None:
        """What was found; None: the bound does not hold at the lowest rate that was tried."""
        return maximum_rate(by_rate(self.records), self._bound)

    def tried(self) -> list[list[float]]:
        """Rates and the means over seeds that they gave."""
        return [[rate, mean(some, self._bound.field)] for rate, some in by_rate(self.records).items()]


def run_plans(name: str, plans: Sequence[SweepPlan], options: Options) -> None:
    """Run all plans; how far they are goes to stderr."""
    sweep(plans, options.jobs, _Notices(name))


class _Notices:
    """Says now and then how many runs are over."""

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
    """Requests per second that each system computes while more wait than it can take: tokens generated per second
    over the mean output. This is what a load of 1 means."""
    plans = []
    for of, workload in pairs:
        # An engine of these sizes makes fewer than 10,000 tokens per second.
        limit = max(100, round(10_000 * _SATURATED_S / workload.streams[0].lengths.mean()[1]))
        plans.append(grid([Cell(of, workload, Extent(1e5, None, 0, limit, _SATURATED_S))]))
    run_plans(f"{name}, capacity", plans, options)
    return [
        plan.records[0]["throughput_tps"] / workload.streams[0].lengths.mean()[1]
        for plan, (_, workload) in zip(plans, pairs, strict=True)
    ]


# -- what came of it --------------------------------------------------------------------------------------


def by_rate(records: Sequence[Record]) -> dict[float, list[Record]]:
    """Records by arrival rate, ascending."""
    rates = sorted({record["workload"]["rate_rps"] for record in records})
    return {rate: [record for record in records if record["workload"]["rate_rps"] == rate] for rate in rates}


def mean(records: Sequence[Record], field: str) -> float:
    """The mean over seeds of a dotted field."""
    return fmean(field_value(record, field) for record in records)


def pick(records: Sequence[Record], **wanted: object) -> list[Record]:
    """Records by recipe, model, lengths, max_num_seqs, or rate_rps."""

    def has(record: Record) -> bool:
        places = (record, record["workload"], record.get("settings", {}))
        return all(any(place.get(name) == value for place in places) for name, value in wanted.items())

    return [record for record in records if has(record)]
