"""`skipjoin simulate`."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from skipjoin.bench.simulation import Cell, Extent
from skipjoin.bench.workload import Workload
from skipjoin.cli.options import ENGINE, Objective, Starvation, plain_errors
from skipjoin.cli.workload import (
    AppendOption,
    ArrivalsOption,
    BestEffortOption,
    DurationOption,
    LengthsOption,
    OutOption,
    OverwriteOption,
    RatesOption,
    RequestsOption,
    SeedsOption,
    SloJct,
    SloTpot,
    SloTtft,
    SpeedupOption,
    StreamOption,
    TraceOption,
    existing_results,
    has_own_times,
    make_slo,
    make_workload,
    parse_rates,
    parse_seeds,
    rates_of,
)
from skipjoin.config import ConfigError
from skipjoin.recipes import RECIPES

_INTERRUPTED = 128 + signal.SIGINT
_START_RPS = 1.0  # where a search for the largest rate begins
_DURATION_S = 300.0


def simulate(
    *,
    model: Annotated[str | None, typer.Option(help="Model of the catalogue, such as opt-13b.")] = None,
    hardware: Annotated[
        str, typer.Option(help="a100-40gb, a100-40gb:tp8pp2, ... or the JSON file of `skipjoin profile`.")
    ] = "a100-40gb",
    kv_gib: Annotated[
        float | None, typer.Option(help="Size of the KV pool in GiB (default: what the memory leaves).")
    ] = None,
    swap_space: Annotated[
        float | None,
        typer.Option(
            "--swap-space",
            "--kv-offloading-size",
            metavar="GIB",
            help="Size of the host pool; 0: none (default: half of the GPUs' share of RAM, or as the KV pool).",
        ),
    ] = None,
    recipes: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(sorted(RECIPES))}.")] = "fastserve",
    lengths: LengthsOption = "sharegpt",
    arrivals: ArrivalsOption = "poisson",
    rates: RatesOption = None,
    duration: DurationOption = None,
    requests: RequestsOption = None,
    seeds: SeedsOption = "0",
    trace: TraceOption = None,
    speedup: SpeedupOption = 1.0,
    best_effort_share: BestEffortOption = None,
    stream: StreamOption = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests in a step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in a step.")] = 2048,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and output.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block (default: 16).")] = None,
    slo_s: Objective = ENGINE.slo_s,
    starvation_s: Starvation = ENGINE.starvation_s,
    max_tokens: Annotated[
        int | None, typer.Option(help="What requests ask for (default: just what they will generate).")
    ] = None,
    decision_ms: Annotated[
        float | None, typer.Option(help="Host milliseconds that each decision takes (default: 0, or the profile's).")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Copies of the system behind one dispatcher.")] = 1,
    dispatch: Annotated[
        str, typer.Option(help="round-robin, least-work (lengths are learnt) or least-work-oracle.")
    ] = "round-robin",
    find_max_rate: Annotated[
        str | None,
        typer.Option(help="Search the largest rate with, for example, 'normalized_latency_s.mean<=0.3'."),
    ] = None,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_jct: SloJct = None,
    slo_scale: Annotated[
        float | None, typer.Option(help="Objectives as so many times the light-load prefill and decode step.")
    ] = None,
    until: Annotated[
        float | None, typer.Option(help="Stop at this second; who is not finished counts with its age.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes (default: one per core).")] = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    append: AppendOption = False,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Trace of a single run (its first replica) for Perfetto or chrome://tracing."),
    ] = None,
) -> None:
    """Run recipes on a virtual clock: the server's own scheduler on a GPU of the catalogue or on a profile."""
    from skipjoin.bench.bound import parse_bound  # noqa: PLC0415
    from skipjoin.bench.results import ResultsFile  # noqa: PLC0415
    from skipjoin.bench.sweep import Grid, RateSearch, sweep  # noqa: PLC0415
    from skipjoin.bench.systems import Machine  # noqa: PLC0415
    from skipjoin.cli.simulate_report import SimulationReport, trace_run  # noqa: PLC0415

    with plain_errors():
        if slo_scale is not None and (slo_ttft or slo_tpot or slo_jct):
            raise ConfigError("slo-scale and the single objectives exclude each other")
        for name, value in (("slo-scale", slo_scale), ("until", until), ("jobs", jobs)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, got {value}")
        machine = Machine(
            hardware=hardware,
            model=model,
            kv_gib=kv_gib,
            swap_gib=swap_space,
            block_size=block_size,
            max_model_len=max_model_len,
        )
        systems = machine.systems(
            recipes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            slo_s=slo_s,
            starvation_s=starvation_s,
            max_tokens=max_tokens,
            replicas=replicas,
            dispatch=dispatch,
            **({} if decision_ms is None else {"decision_s": decision_ms / 1000}),
        )
        workload = make_workload(
            lengths=lengths,
            arrivals=arrivals,
            trace=trace,
            speedup=speedup,
            best_effort_share=best_effort_share,
            streams=stream,
        )
        bound = parse_bound(find_max_rate) if find_max_rate else None
        all_rates = rates_of(rates, workload) if bound is None else _start_rates(rates, workload)
        if duration is None and requests is None and all_rates != (None,):
            duration = _DURATION_S
        slo = make_slo(slo_ttft, slo_tpot, slo_jct)
        stop = math.inf if until is None else until
        cells = [
            Cell(system, workload, Extent(rate, duration, seed, requests, stop), slo, slo_scale)
            for system in systems
            for rate in all_rates
            for seed in parse_seeds(seeds)
        ]
        cells[0].check()
        if timeline is not None and (len(cells) > 1 or bound):
            raise ConfigError("timeline is for a single run: one recipe, one rate, one seed")
        results = ResultsFile(out, existing=existing_results(overwrite=overwrite, append=append)) if out else None
        # Told to end as by an interrupt, it takes its processes with it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with SimulationReport(results, bound) as report:
            plans = [Grid(cells)] if bound is None else [RateSearch(group, bound) for group in _by_system(cells)]
            try:
                if timeline is not None:
                    trace_run(cells[0], timeline, report)
                    return
                sweep(plans, jobs or os.cpu_count() or 1, report)
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
