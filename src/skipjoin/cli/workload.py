from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from skipjoin.observe.record import Slo
from skipjoin.options import ConfigError, Option, check, settings_of
from skipjoin.report.results import Existing
from skipjoin.workload.agents import AGENTS, Agents
from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.fields import MAX_REQUESTS, number
from skipjoin.workload.streams import parse_closed
from skipjoin.workload.trace_units import TIME_UNITS
from skipjoin.workload.traces import read_trace
from skipjoin.workload.workload import Classed, Replay, Synthetic, Workload, synthetic, with_best_effort, with_closed

_WORKLOAD, _OBJECTIVES, _RESULTS = "Workload", "Objectives", "Results"
# Maximum number of seeds, so that a wrong range is an error instead of runs without end.
_MAX_SEEDS = 1000
_load = partial(Option, group=_WORKLOAD, is_common=True)
_load_detail = partial(Option, group=_WORKLOAD)
_objective = partial(Option, group=_OBJECTIVES, is_common=True)
_result = partial(Option, group=_RESULTS)


def _in_ms(flag: str) -> Option:
    return Option(f"As --{flag}, in milliseconds, as for `serve`.", above=0, metavar="MILLISECONDS", group=_OBJECTIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    lengths: Annotated[
        str,
        _load(
            "Prompt and output lengths: sharegpt, alpaca, lmsys, bookcorpus, uniform:64-128,16-32, fixed:128,64 or "
            "trace:FILE (its rows at random); *0.5 or *0.5,0.25 scales them. agents is programs of 2 to 40 calls, of "
            "which --rates are programs per second.",
            metavar="LENGTHS",
        ),
    ] = "sharegpt"
    arrivals: Annotated[
        str, _load("Arrival process: poisson, gamma:CV, burst:FACTOR,SHARE,LENGTH or constant.", metavar="ARRIVALS")
    ] = "poisson"
    rates: Annotated[str | None, _load("Requests per second, separated by commas.", metavar="RATES")] = None
    duration: Annotated[float | None, _load("Time in which requests arrive.", above=0, high=1e9, metavar="SECONDS")] = (
        None
    )
    requests: Annotated[int | None, _load("Number of requests, instead of --duration.", low=1, high=MAX_REQUESTS)] = (
        None
    )
    seeds: Annotated[str, _load("Seeds separated by commas, or 0-2 for a range.", metavar="SEEDS")] = "0"
    trace: Annotated[
        Path | None,
        _load(
            "Trace instead of --lengths: CSV or JSONL with prompt_tokens, output_tokens and optionally arrival_s, "
            "deadline_s, priority, class, ttft_s, tpot_s, jct_s, program and pause_s; JSONL with the texts prompt and "
            "output; or Mooncake's JSONL.",
            metavar="FILE",
        ),
    ] = None
    time_unit: Annotated[
        str,
        _load_detail(
            "Unit of a trace's timestamp: Mooncake's milliseconds, or seconds, as Qwen-Bailian's",
            choices=("auto", *TIME_UNITS),
        ),
    ] = "auto"
    hash_tokens: Annotated[
        int | None,
        _load_detail("Prompt tokens of each of a trace's hash_ids; detected by default.", low=1, high=1 << 31),
    ] = None
    prefix: Annotated[
        str | None,
        _load_detail(
            "Common prefix of all prompts of --lengths, or one prefix for each of several groups.",
            metavar="TOKENS[:GROUPS]",
        ),
    ] = None
    ignore_columns: Annotated[
        str | None, _load_detail("Unknown columns of a trace to ignore, separated by commas.", metavar="NAMES")
    ] = None
    speedup: Annotated[float, _load_detail("Factor by which a trace's arrivals are sped up.")] = 1.0
    best_effort_share: Annotated[float | None, _load_detail("Share of best-effort requests.", metavar="SHARE")] = None
    stream: Annotated[
        tuple[str, ...],
        _load_detail(
            "Additional stream with a share of the rate, such as "
            "name=batch,lengths=uniform:512-1024,32-128,share=0.3,class=best-effort. It may also set priority, "
            "arrivals, prefix and, in a simulation, key (an API key); may be repeated.",
            metavar="STREAM",
        ),
    ] = ()
    closed: Annotated[
        tuple[str, ...],
        _load_detail(
            "Additional closed loop with size requests in flight until --duration, such as "
            "name=be,lengths=uniform:512-1024,32-128,size=128,class=best-effort. mode=batch (default) replaces all "
            "requests when the last has finished, mode=refill each one. It may also set priority and prefix; may be "
            "repeated.",
            metavar="STREAM",
        ),
    ] = ()
    slo_ttft: Annotated[float | None, _objective("Time to the first token.", above=0, metavar="SECONDS")] = None
    slo_tpot: Annotated[float | None, _objective("Time per token after the first.", above=0, metavar="SECONDS")] = None
    slo_jct: Annotated[
        float | None, Option("Time from arrival to the last token.", above=0, metavar="SECONDS", group=_OBJECTIVES)
    ] = None
    slo_ttft_ms: Annotated[float | None, _in_ms("slo-ttft")] = None
    slo_tpot_ms: Annotated[float | None, _in_ms("slo-tpot")] = None
    slo_jct_ms: Annotated[float | None, _in_ms("slo-jct")] = None
    out: Annotated[
        Path | None, _result("File for the results, a JSON array of records.", metavar="FILE", is_common=True)
    ] = None
    overwrite: Annotated[bool, _result("Replace the results in --out.")] = False
    append: Annotated[bool, _result("Add to the results in --out.")] = False

    def __post_init__(self) -> None:
        check(self)
        if self.duration is not None and self.requests is not None:
            raise ConfigError("duration and --requests exclude each other")
        if self.overwrite and self.append:
            raise ConfigError("overwrite and append exclude each other")
        for name in ("slo_ttft", "slo_tpot", "slo_jct"):
            if getattr(self, name) is not None and getattr(self, f"{name}_ms") is not None:
                raise ConfigError(f"{name} and {name}_ms are the same: give one of them")

    @property
    def slo(self) -> Slo:
        return Slo(*map(self._seconds, ("slo_ttft", "slo_tpot", "slo_jct")))

    def _seconds(self, name: str) -> float | None:
        seconds: float | None = getattr(self, name)
        ms: float | None = getattr(self, f"{name}_ms")
        return seconds if ms is None else ms / 1000

    @property
    def existing(self) -> Existing:
        return "replace" if self.overwrite else "extend" if self.append else "refuse"

    def workload(self, *, reads: Collection[str] = ()) -> Synthetic | Replay | Agents:
        if self.lengths == AGENTS:
            return self._agents()
        if self.trace is not None:
            if self.stream:
                raise ConfigError("stream goes with lengths, not with trace")
            if self.prefix is not None:
                raise ConfigError("prefix goes with lengths, not with trace")
            trace = read_trace(self.trace, time_unit=self.time_unit, hash_tokens=self.hash_tokens)
            print(trace.describe(), file=sys.stderr)
            ignored = (self.ignore_columns or "").split(",")
            trace.check_columns([*reads, *(name.strip() for name in ignored)])
            return self._beside(Replay(trace, self.speedup, parse_arrivals(self.arrivals)))
        for name in ("speedup", "time_unit", "hash_tokens", "ignore_columns"):
            if getattr(self, name) != settings_of(LoadOptions)[name].default:
                raise ConfigError(f"{name} goes with trace")
        return self._beside(synthetic(self.lengths, self.arrivals, self.stream, self.prefix))

    def _agents(self) -> Agents:
        for name in ("arrivals", "trace", "prefix", "stream", "closed", "best_effort_share"):
            if getattr(self, name) != settings_of(LoadOptions)[name].default:
                raise ConfigError(f"{name} and lengths {AGENTS} exclude each other")
        return Agents()

    def _beside(self, workload: Classed) -> Classed:
        if self.best_effort_share is not None:
            workload = with_best_effort(workload, self.best_effort_share)
        return with_closed(workload, [parse_closed(text) for text in self.closed])

    def duration_s(self, rates: tuple[float | None, ...], usual: float) -> float | None:
        says_nothing = self.duration is None and self.requests is None and rates != (None,)
        return usual if says_nothing else self.duration


def parse_rates(text: str) -> tuple[float, ...]:
    rates = tuple(number("rates", part) for part in text.split(","))
    if len(set(rates)) != len(rates):
        raise ConfigError(f"rates must be different numbers, got {text!r}")
    return rates


def rates_of(text: str | None, workload: Workload) -> tuple[float | None, ...]:
    if has_own_times(workload):
        if text:
            raise ConfigError("rates must not be given: the trace has arrival times of its own, which --speedup scales")
        return (None,)
    if not text:
        raise ConfigError("rates must be given, as requests per second")
    return parse_rates(text)


def has_own_times(workload: Workload) -> bool:
    return isinstance(workload, Replay) and workload.trace.has_arrivals


def parse_seeds(text: str) -> tuple[int, ...]:
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not (low.isdigit() and (not dash or high.isdigit())):
            raise ConfigError(f"seeds must be integers of at least 0, or ranges like 0-2, got {part.strip()!r}")
        found = range(int(low), int(high or low) + 1)
        # Not len, which fails for ranges of more than a machine word.
        if len(seeds) + found.stop - found.start > _MAX_SEEDS:
            raise ConfigError(
                f"seeds must be at most {_MAX_SEEDS} numbers, got {text.strip()!r}: choose a shorter range"
            )
        seeds.extend(found)
    if len(set(seeds)) != len(seeds) or not seeds:
        raise ConfigError(f"seeds must be different integers, got {text!r}")
    return tuple(seeds)
