from __future__ import annotations

import math
import os
import signal
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from skipjoin.cli.connection import INTERRUPTED
from skipjoin.cli.options import Section, Values, takes
from skipjoin.cli.requests_file import RequestsFile
from skipjoin.cli.simulate_report import Goal, SimulationReport, kept_requests, single_run
from skipjoin.cli.workload import LoadOptions, has_own_times, parse_rates, parse_seeds, rates_of
from skipjoin.config import ConfigError
from skipjoin.core.request import NO_TARGET
from skipjoin.observe.record import NO_SLO, Slo
from skipjoin.options import Option, check
from skipjoin.recipes import DEFAULT, find, names_in, read_assignments
from skipjoin.report.bound import OBJECTIVES_HINT, Bounds, needs_objectives, parse_bound
from skipjoin.report.results import ResultsFile
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.predictors import columns_of
from skipjoin.sim.experiments.sweep import Grid, RateSearch, ReplicaSearch, sweep
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import Replay, Workload, keys_of

_START_RPS = 1.0  # initial rate of a search
_DURATION_S = 300.0


_SCHEDULING, _RUNS = "Scheduling", "Runs"
_scheduling = partial(Option, group=_SCHEDULING, is_common=True)
_search = partial(Option, group=_RUNS, is_common=True)
_run_option = partial(Option, group=_RUNS)
# Fields of a system that are independent of the machine.
_CHOSEN = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "slo_s",
    "best_effort_wait_s",
    "fair_by",
    "fair_output_weight",
    "max_tokens",
    "predictor",
    "enable_prefix_caching",
    "pipeline_depth",
    "replicas",
    "dispatch",
    "prefill_replicas",
    "network_gbps",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    recipes: Annotated[
        str,
        _scheduling(
            "Names that `skipjoin recipes` lists, or FILE.py:NAME, separated by commas. NAME[PARAMETER=VALUE,...] has "
            "parameters of its own.",
            flags=("--recipes", "--recipe"),
            metavar="NAMES",
        ),
    ] = DEFAULT
    params: Annotated[
        tuple[str, ...],
        _scheduling(
            "Parameter of every recipe that has it, unless the recipe sets it in brackets; may be repeated.",
            flags=("--set",),
            metavar="NAME=VALUE",
        ),
    ] = ()
    decision_ms: Annotated[
        float | None,
        Option(
            "CPU time of each scheduling decision (default: 0, or the profile's).",
            low=0,
            high=1e9,
            metavar="MS",
            group="System",
        ),
    ] = None
    find_max_rate: Annotated[
        tuple[str, ...],
        _search(
            "Search for the highest rate that meets a bound, such as 'normalized_latency_s.mean<=0.3'; may be "
            "repeated, and all bounds must hold.",
            metavar="BOUND",
        ),
    ] = ()
    find_min_replicas: Annotated[
        tuple[str, ...],
        _search(
            "Search for the smallest number of replicas, from --replicas up, that meets a bound at each rate, such as "
            "'slo.goodput_rps>=100'; may be repeated, and all bounds must hold.",
            metavar="BOUND",
        ),
    ] = ()
    slo_scale: Annotated[
        float | None,
        Option(
            "TTFT and TPOT objectives as a multiple of a prefill and a decode step at light load.",
            above=0,
            high=1e9,
            group="Objectives",
        ),
    ] = None
    slo_jct_scale: Annotated[
        float | None,
        Option(
            "JCT objective of each request as a multiple of its prefill and decode steps at light load. Policies get "
            "the objective of the predicted length.",
            above=0,
            high=1e9,
            group="Objectives",
        ),
    ] = None
    until: Annotated[
        float | None,
        _run_option(
            "Stop at this time; an unfinished request counts with its age.", above=0, high=1e12, metavar="SECONDS"
        ),
    ] = None
    jobs: Annotated[int | None, _search("Number of processes (default: one per core).", low=1, high=1024)] = None
    timeline: Annotated[
        Path | None,
        _run_option(
            "Write a trace of a single run (its first replica) for Perfetto or chrome://tracing.", metavar="FILE"
        ),
    ] = None
    record_requests: Annotated[
        Path | None, Option("File for the times of each request, as JSON lines.", metavar="FILE", group="Results")
    ] = None

    def __post_init__(self) -> None:
        check(self)
        if self.find_max_rate and self.find_min_replicas:
            raise ConfigError("find_max_rate and find_min_replicas exclude each other")

    def goal(self) -> Goal | None:
        bounds = Bounds(tuple(map(parse_bound, self.find_max_rate or self.find_min_replicas)))
        return Goal(RateSearch if self.find_max_rate else ReplicaSearch, bounds) if bounds.parts else None

    def system_values(self) -> Values:
        given = read_assignments([find(name) for name in names_in(self.recipes)], self.params, "set")
        values: Values = {"recipe_params": given}
        return values if self.decision_ms is None else values | {"decision_s": self.decision_ms / 1000}

    def objectives(self, single: Slo) -> Slo:
        if self.slo_scale is not None and single != NO_SLO:
            raise ConfigError("slo_scale and the single objectives exclude each other")
        if self.slo_jct_scale is None:
            return single
        if self.slo_scale is not None:
            raise ConfigError("slo_jct_scale and slo_scale exclude each other")
        if single.jct_s is not None:
            raise ConfigError("slo_jct_scale and slo_jct exclude each other")
        return replace(single, jct_scale=self.slo_jct_scale)


@takes(runs=Section(RunOptions), machine=Section(Machine), system=Section(System, _CHOSEN), load=Section(LoadOptions))
def simulate(*, runs: Values, machine: Values, system: Values, load: Values) -> None:
    """Run recipes on a virtual clock: the server's own scheduler on a GPU of the catalog or on a profile."""
    wanted, options = RunOptions(**runs), LoadOptions(**load)
    slo = wanted.objectives(options.slo)
    if wanted.find_min_replicas and system["prefill_replicas"]:
        raise ConfigError(
            "find_min_replicas and prefill_replicas exclude each other: the search adds replicas of one kind"
        )
    systems = Machine(**machine).systems(wanted.recipes, **system, **wanted.system_values())
    reads = columns_of(system["predictor"])
    workload = options.workload(reads=reads)
    if wanted.slo_jct_scale is not None and isinstance(workload, Replay) and workload.trace.has_any("jct_s"):
        raise ConfigError(f"slo_jct_scale and the column jct_s of {workload.trace.name} exclude each other")
    if system["fair_by"] == "key" and len(keys_of(workload)) < 2:
        raise ConfigError("fair_by key needs requests of different keys: set key= in stream or closed")
    goal = wanted.goal()
    rates = (_start_rates if wanted.find_max_rate else rates_of)(options.rates, workload)
    duration_s = options.duration_s(rates, _DURATION_S)
    stop = math.inf if wanted.until is None else wanted.until
    cells = [
        Cell(system, workload, Extent(rate, duration_s, seed, options.requests, stop), slo, wanted.slo_scale)
        for system in systems
        for rate in rates
        for seed in parse_seeds(options.seeds)
    ]
    cells[0].check()
    _check_objectives(goal, cells[0])
    if wanted.timeline is not None and (len(cells) > 1 or goal):
        raise ConfigError("timeline is for a single run: one recipe, one rate, one seed")
    results = ResultsFile(options.out, existing=options.existing) if options.out else None
    requests = RequestsFile(wanted.record_requests, options.existing) if wanted.record_requests else None
    _run(cells, SimulationReport(results, goal), goal, wanted, requests)


def _check_objectives(goal: Goal | None, cell: Cell) -> None:
    field = None if goal is None else needs_objectives(goal.bounds)
    is_set = cell.slo != NO_SLO or cell.slo_scale is not None or any(job.target != NO_TARGET for job in cell.jobs())
    if field is not None and not is_set:
        raise ConfigError(f"bound: {field} would be null{OBJECTIVES_HINT}")


def _run(
    cells: list[Cell], report: SimulationReport, goal: Goal | None, wanted: RunOptions, requests: RequestsFile | None
) -> None:
    # Exit as on an interrupt, which also ends the worker processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with kept_requests(requests) as on_requests, report:
        plans = [Grid(cells)] if goal is None else [goal.search(group, goal.bounds) for group in _alike(cells)]
        try:
            if wanted.timeline is not None:
                single_run(cells[0], report, wanted.timeline, on_requests)
                return
            sweep(plans, wanted.jobs or os.cpu_count() or 1, report, on_requests=on_requests)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _start_rates(text: str | None, workload: Workload) -> tuple[float, ...]:
    if has_own_times(workload):
        raise ConfigError("find_max_rate needs arrivals at a rate, and the trace has times of its own")
    found = parse_rates(text) if text else (_START_RPS,)
    if len(found) > 1:
        raise ConfigError("find_max_rate starts from one rate at most")
    return found


def _alike(cells: list[Cell]) -> list[list[Cell]]:
    groups: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.system.recipe, cell.extent.rate_rps), []).append(cell)
    return list(groups.values())
