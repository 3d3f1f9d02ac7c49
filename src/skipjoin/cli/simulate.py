"""`skipjoin simulate`."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from skipjoin.bench.bound import Bound, parse_bound
from skipjoin.bench.results import ResultsFile
from skipjoin.bench.simulation import Cell, Extent, System
from skipjoin.bench.sweep import Grid, RateSearch, sweep
from skipjoin.bench.systems import Machine
from skipjoin.bench.workload import Workload
from skipjoin.cli.options import Section, Values, read_assignments, takes
from skipjoin.cli.simulate_report import SimulationReport, trace_run
from skipjoin.cli.workload import LoadOptions, has_own_times, parse_rates, parse_seeds, rates_of
from skipjoin.config import DEPRECATED, ConfigError, with_aliases
from skipjoin.observe.record import NO_SLO
from skipjoin.recipes import DEFAULT, find

_INTERRUPTED = 128 + signal.SIGINT
_START_RPS = 1.0  # where a search for the largest rate begins
_DURATION_S = 300.0


_SCHEDULING, _RUNS = "Scheduling", "Runs"
# The fields of a system that the machine does not decide.
_CHOSEN = ("max_num_seqs", "max_num_batched_tokens", "slo_s", "max_tokens", "replicas", "dispatch")


@takes(machine=Section(Machine), system=Section(System, _CHOSEN), load=Section(LoadOptions))
def simulate(
    *,
    recipes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Separated by commas; `skipjoin recipes` lists all of them.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = DEFAULT,
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A parameter of those of the recipes that have it; may be repeated.",
            rich_help_panel=_SCHEDULING,
        ),
    ] = None,
    starvation_s: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="As --set starvation_s=SECONDS.", rich_help_panel=DEPRECATED),
    ] = None,
    decision_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Host time that each decision takes (default: 0, or the profile's).",
            rich_help_panel="System",
        ),
    ] = None,
    find_max_rate: Annotated[
        str | None,
        typer.Option(
            metavar="BOUND",
            help="Search the largest rate with, for example, 'normalized_latency_s.mean<=0.3'.",
            rich_help_panel=_RUNS,
        ),
    ] = None,
    slo_scale: Annotated[
        float | None,
        typer.Option(
            help="Objectives as so many times the light-load prefill and decode step.", rich_help_panel="Objectives"
        ),
    ] = None,
    until: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stop at this second; a request that is not finished counts with its age.",
            rich_help_panel=_RUNS,
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes (default: one per core).", rich_help_panel=_RUNS)] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trace of a single run (its first replica) for Perfetto or chrome://tracing.",
            rich_help_panel=_RUNS,
        ),
    ] = None,
    machine: Values,
    system: Values,
    load: Values,
) -> None:
    """Run recipes on a virtual clock: the server's own scheduler on a GPU of the catalogue or on a profile."""
    options = LoadOptions(**load)
    if slo_scale is not None and options.slo != NO_SLO:
        raise ConfigError("slo-scale and the single objectives exclude each other")
    for name, value in (("slo-scale", slo_scale), ("until", until), ("jobs", jobs)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} must be above 0, got {value}")
    given = read_assignments([find(name.strip()) for name in recipes.split(",")], params or ())
    system["recipe_params"] = with_aliases(given, starvation_s=starvation_s)
    if decision_ms is not None:
        system["decision_s"] = decision_ms / 1000
    systems = Machine(**machine).systems(recipes, **system)
    workload = options.workload()
    bound = parse_bound(find_max_rate) if find_max_rate else None
    rates = rates_of(options.rates, workload) if bound is None else _start_rates(options.rates, workload)
    duration_s = options.duration_s(rates, _DURATION_S)
    stop = math.inf if until is None else until
    cells = [
        Cell(system, workload, Extent(rate, duration_s, seed, options.requests, stop), options.slo, slo_scale)
        for system in systems
        for rate in rates
        for seed in parse_seeds(options.seeds)
    ]
    cells[0].check()
    if timeline is not None and (len(cells) > 1 or bound):
        raise ConfigError("timeline is for a single run: one recipe, one rate, one seed")
    results = ResultsFile(options.out, existing=options.existing) if options.out else None
    _run(cells, SimulationReport(results, bound), bound, timeline, jobs or os.cpu_count() or 1)


def _run(
    cells: list[Cell], report: SimulationReport, bound: Bound | None, timeline: Path | None, processes: int
) -> None:
    # Told to end as by an interrupt, it takes its processes with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with report:
        plans = [Grid(cells)] if bound is None else [RateSearch(group, bound) for group in _by_system(cells)]
        try:
            if timeline is not None:
                trace_run(cells[0], timeline, report)
                return
            sweep(plans, processes, report)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None


def _start_rates(text: str | None, workload: Workload) -> tuple[float, ...]:
    """The rate that a search starts from."""
    if has_own_times(workload):
        raise ConfigError("find-max-rate needs arrivals at a rate, and the trace has times of its own")
    found = parse_rates(text) if text else (_START_RPS,)
    if len(found) > 1:
        raise ConfigError("find-max-rate starts from one rate at most")
    return found


def _by_system(cells: list[Cell]) -> list[list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.system.recipe, []).append(cell)
    return list(groups.values())
