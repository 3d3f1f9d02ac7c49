"""What `simulate` and `bench` share: the options that say which requests arrive when, and where results go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skipjoin.bench.arrivals import parse_arrivals
from skipjoin.bench.fields import number
from skipjoin.bench.results import Existing
from skipjoin.bench.trace import read_trace
from skipjoin.bench.workload import Replay, Workload, synthetic, with_best_effort
from skipjoin.config import ConfigError
from skipjoin.observe.record import Slo

_LENGTHS = "sharegpt, alpaca, lmsys, bookcorpus, uniform:64-128,16-32 or fixed:128,64; *0.5 or *0.5,0.25 scales them."
LengthsOption = Annotated[str, typer.Option("--lengths", help=f"Prompt and output lengths: {_LENGTHS}")]
ArrivalsOption = Annotated[
    str, typer.Option("--arrivals", help="poisson, gamma:CV, burst:FACTOR,SHARE,LENGTH or constant.")
]
RatesOption = Annotated[str | None, typer.Option("--rates", help="Requests per second, separated by commas.")]
DurationOption = Annotated[float | None, typer.Option("--duration", help="Seconds in which requests arrive.")]
RequestsOption = Annotated[int | None, typer.Option("--requests", help="How many requests, instead of --duration.")]
SeedsOption = Annotated[str, typer.Option("--seeds", help="Seeds separated by commas, or 0-2 for a range.")]
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", help="CSV with prompt_tokens, output_tokens and perhaps arrival_s, instead of --lengths."),
]
SpeedupOption = Annotated[float, typer.Option("--speedup", help="Play a trace's arrival times this much faster.")]
BestEffortOption = Annotated[
    float | None, typer.Option("--best-effort-share", help="Share of requests of class best-effort, priority 10.")
]
StreamOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stream",
        help="A further class: name=batch,lengths=uniform:512-1024,32-128,share=0.3,priority=10; may be repeated.",
    ),
]
SloTtft = Annotated[float | None, typer.Option("--slo-ttft", help="Seconds to the first token.")]
SloTpot = Annotated[float | None, typer.Option("--slo-tpot", help="Seconds per token after the first.")]
SloJct = Annotated[float | None, typer.Option("--slo-jct", help="Seconds from arrival to end.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="File for the results, a JSON array of records.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the results in --out.")]
AppendOption = Annotated[bool, typer.Option("--append", help="Add to the results in --out.")]


def make_workload(
    *,
    lengths: str,
    arrivals: str,
    trace: Path | None,
    speedup: float,
    best_effort_share: float | None,
    streams: list[str] | None,
) -> Workload:
    """The workload that the options describe. Raises `ConfigError`."""
    if trace is not None:
        if streams:
            raise ConfigError("stream goes with lengths, not with trace")
        replay = Replay(read_trace(trace), speedup, parse_arrivals(arrivals))
        return replay if best_effort_share is None else with_best_effort(replay, best_effort_share)
    if speedup != 1:
        raise ConfigError("speedup goes with trace")
    drawn = synthetic(lengths, arrivals, streams or ())
    return drawn if best_effort_share is None else with_best_effort(drawn, best_effort_share)


def parse_rates(text: str) -> tuple[float, ...]:
    """Requests per second from "0.5,1,2". Raises `ConfigError`."""
    rates = tuple(number("rates", part) for part in text.split(","))
    if len(set(rates)) != len(rates):
        raise ConfigError(f"rates must be different numbers, got {text!r}")
    return rates


def rates_of(text: str | None, workload: Workload) -> tuple[float | None, ...]:
    """The rates to run a workload at; None where it has its own. Raises `ConfigError`."""
    if has_own_times(workload):
        if text:
            raise ConfigError("the trace has arrival times of its own: use speedup instead of rates")
        return (None,)
    if not text:
        raise ConfigError("rates must be given, as requests per second")
    return parse_rates(text)


def has_own_times(workload: Workload) -> bool:
    """Whether it says itself when requests arrive."""
    return isinstance(workload, Replay) and workload.trace.has_arrivals


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from "0,3,7" or "0-2". Raises `ConfigError`."""
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not (low.isdigit() and (not dash or high.isdigit())):
            raise ConfigError(f"seeds must be integers of at least 0, or ranges like 0-2, got {part.strip()!r}")
        seeds.extend(range(int(low), int(high or low) + 1))
    if len(set(seeds)) != len(seeds) or not seeds:
        raise ConfigError(f"seeds must be different integers, got {text!r}")
    return tuple(seeds)


def make_slo(ttft: float | None, tpot: float | None, jct: float | None) -> Slo:
    """The objectives. Raises `ConfigError` for one that is not above 0."""
    for name, value in (("slo-ttft", ttft), ("slo-tpot", tpot), ("slo-jct", jct)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be above 0 seconds, got {value}")
    return Slo(ttft, tpot, jct)


def existing_results(*, overwrite: bool, append: bool) -> Existing:
    """What to do with a results file that exists. Raises `ConfigError` if both are wanted."""
    if overwrite and append:
        raise ConfigError("overwrite and append exclude each other")
    return "replace" if overwrite else "extend" if append else "refuse"
