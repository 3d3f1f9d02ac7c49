"""What `simulate` and `bench` share: the options that say which requests arrive when, and where results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from skipjoin.bench.arrivals import parse_arrivals
from skipjoin.bench.fields import number
from skipjoin.bench.results import Existing
from skipjoin.bench.trace import read_trace
from skipjoin.bench.workload import Replay, Workload, synthetic, with_best_effort
from skipjoin.knobs import ConfigError, Knob, check
from skipjoin.observe.record import Slo

_WORKLOAD, _OBJECTIVES, _RESULTS = "Workload", "Objectives", "Results"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Which requests arrive when, what counts as good, and where results go. Raises `ConfigError`."""

    lengths: Annotated[
        str,
        Knob(
            "Prompt and output lengths: sharegpt, alpaca, lmsys, bookcorpus, uniform:64-128,16-32 or fixed:128,64; "
            "*0.5 or *0.5,0.25 scales them.",
            metavar="LENGTHS",
            group=_WORKLOAD,
        ),
    ] = "sharegpt"
    arrivals: Annotated[
        str, Knob("poisson, gamma:CV, burst:FACTOR,SHARE,LENGTH or constant.", metavar="ARRIVALS", group=_WORKLOAD)
    ] = "poisson"
    rates: Annotated[
        str | None, Knob("Requests per second, separated by commas.", metavar="RATES", group=_WORKLOAD)
    ] = None
    duration: Annotated[float | None, Knob("Time in which requests arrive.", metavar="SECONDS", group=_WORKLOAD)] = None
    requests: Annotated[int | None, Knob("How many requests, instead of --duration.", group=_WORKLOAD)] = None
    seeds: Annotated[str, Knob("Seeds separated by commas, or 0-2 for a range.", metavar="SEEDS", group=_WORKLOAD)] = (
        "0"
    )
    trace: Annotated[
        Path | None,
        Knob(
            "CSV with prompt_tokens, output_tokens and perhaps arrival_s, or JSONL with these or the texts prompt and "
            "output, instead of --lengths.",
            metavar="FILE",
            group=_WORKLOAD,
        ),
    ] = None
    speedup: Annotated[float, Knob("Play a trace's arrival times this much faster.", group=_WORKLOAD)] = 1.0
    best_effort_share: Annotated[
        float | None, Knob("Share of requests of class best-effort, priority 10.", metavar="SHARE", group=_WORKLOAD)
    ] = None
    stream: Annotated[
        tuple[str, ...],
        Knob(
            "A further class: name=batch,lengths=uniform:512-1024,32-128,share=0.3,priority=10; may be repeated.",
            metavar="STREAM",
            group=_WORKLOAD,
        ),
    ] = ()
    slo_ttft: Annotated[
        float | None, Knob("Time to the first token.", above=0, metavar="SECONDS", group=_OBJECTIVES)
    ] = None
    slo_tpot: Annotated[
        float | None, Knob("Time per token after the first.", above=0, metavar="SECONDS", group=_OBJECTIVES)
    ] = None
    slo_jct: Annotated[
        float | None, Knob("Time from arrival to end.", above=0, metavar="SECONDS", group=_OBJECTIVES)
    ] = None
    out: Annotated[
        Path | None, Knob("File for the results, a JSON array of records.", metavar="FILE", group=_RESULTS)
    ] = None
    overwrite: Annotated[bool, Knob("Replace the results in --out.", group=_RESULTS)] = False
    append: Annotated[bool, Knob("Add to the results in --out.", group=_RESULTS)] = False

    def __post_init__(self) -> None:
        check(self)
        if self.overwrite and self.append:
            raise ConfigError("overwrite and append exclude each other")

    @property
    def slo(self) -> Slo:
        """The objectives."""
        return Slo(self.slo_ttft, self.slo_tpot, self.slo_jct)

    @property
    def existing(self) -> Existing:
        """What to do with a results file that exists."""
        return "replace" if self.overwrite else "extend" if self.append else "refuse"

    def workload(self) -> Workload:
        """The workload. Raises `ConfigError`."""
        if self.trace is not None:
            if self.stream:
                raise ConfigError("stream goes with lengths, not with trace")
            replay = Replay(read_trace(self.trace), self.speedup, parse_arrivals(self.arrivals))
            return replay if self.best_effort_share is None else with_best_effort(replay, self.best_effort_share)
        if self.speedup != 1:
            raise ConfigError("speedup goes with trace")
        drawn = synthetic(self.lengths, self.arrivals, self.stream)
        return drawn if self.best_effort_share is None else with_best_effort(drawn, self.best_effort_share)

    def duration_s(self, rates: tuple[float | None, ...], usual: float) -> float | None:
        """Seconds in which requests arrive: `usual` if nothing says how many there are."""
        says_nothing = self.duration is None and self.requests is None and rates != (None,)
        return usual if says_nothing else self.duration


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
