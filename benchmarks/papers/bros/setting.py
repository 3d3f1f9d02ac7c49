"""Settings of BROS's evaluation: machines, workloads and variants."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from papers.figures.pictures import curves, legend_of
from papers.figures.report import Column, grouped, heads, mean_of, settings_of, table
from papers.figures.runs import Kept, Options, Result, cells, pick
from papers.figures.variants import Variant, lasting, plain
from skipjoin.core.request import ServiceClass
from skipjoin.observe.record import Record, Slo
from skipjoin.options import Value
from skipjoin.report.bound import field_value
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.system import System
from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.lengths import Lengths, parse_lengths
from skipjoin.workload.streams import Closed, ClosedMode, Stream
from skipjoin.workload.workload import DEFAULT, Synthetic

# Section 7.1: objectives of real-time requests, groups of GPUs, blocks of 16 tokens.
SLO = Slo(ttft_s=0.4, tpot_s=0.2)
MACHINES = {
    "opt-13b": Machine(model="opt-13b", hardware="a100-40gb:tp2", block_size=16),
    "opt-30b": Machine(model="opt-30b", hardware="a100-40gb:tp4", block_size=16),
    "llama-3-70b": Machine(model="llama-3-70b", hardware="a100-80gb:tp8", block_size=16),
}
# Real-time requests per second. The paper has 15 cases for three models and names two: 10 (section 7.4.1) and 15
# (section 7.2.1).
RATES: Mapping[str, Sequence[float]] = {
    "opt-13b": (8.0, 12.0),
    "opt-30b": (8.0, 12.0),
    "llama-3-70b": (8.0, 15.0),
}
DATASETS = ("sharegpt", "lmsys")
# By dataset: real lengths with the means and deviations of table 2 in the folder SKIPJOIN_TRACES, and built-in lengths
# with these means as a fallback.
_LENGTHS = {
    "sharegpt": ("cal_sharegpt_bros.csv", "sharegpt*1.417,0.719"),
    "lmsys": ("cal_lmsys_bros.csv", "lmsys*0.977,1.139"),
}
# Section 7.1: prompts and outputs, submitted as a batch when the previous batch is complete. It does not name the size.
BEST_EFFORT, IN_FLIGHT = "uniform:512-1024,32-128", 128
# Multiples of the 300 s of other figures: 120 s, and the 10 minutes of the paper's traces.
TIMES, PAPER_TIMES = 0.4, 2.0

# Figures 10 to 13 plan a step while another one runs, as a server with a GPU does.
PLANS_IN_FLIGHT = 2

# The first variant ignores classes, as the paper's vLLM does; the others put best effort second.
BLIND = Variant("fcfs, class-blind", "fcfs")
FCFS, ROUND_ROBIN = plain("fcfs", "round-robin")
# The paper's rule, by which any real-time request may be postponed; `replacing` compares with the default.
RECOMPUTE, SWAP, UNSHARED, BROS = (
    replace(variant, params={"replacing": "all"})
    for variant in plain("bros-recompute", "bros-swap", "bros-unshared", "bros")
)
VARIANTS = (BLIND, FCFS, ROUND_ROBIN, RECOMPUTE, SWAP, BROS)
# With the variant that shows what shared blocks gain.
COMPARED = (*VARIANTS, UNSHARED)
# Standard deviation of the logarithm of step times around the modeled ones. The recipe learns a margin from them.
NOISE = 0.1
NOISY = replace(BROS, name=f"bros, noise {NOISE:g}", settings={"step_noise": NOISE})


def shipped(*variants: Variant) -> tuple[Variant, ...]:
    """Return the variants, those of BROS with the parameters that its recipe has by default."""
    return tuple(replace(variant, params={}) if variant.name.startswith("bros") else variant for variant in variants)


@dataclass(frozen=True, slots=True)
class Load:
    """Real-time requests with concurrent best-effort requests.

    Attributes:
        dataset: Lengths of the real-time requests.
        in_flight: Number of best-effort requests, which may be 0.
    """

    dataset: str = "sharegpt"
    in_flight: int = IN_FLIGHT
    mode: ClosedMode = ClosedMode.BATCH

    def workload(self, *, blind: bool) -> Synthetic:
        """Return the workload; with `blind` best-effort requests are real-time."""
        stream = Stream(DEFAULT, lengths(self.dataset), parse_arrivals("poisson"))
        if not self.in_flight:
            return Synthetic((stream,))
        service = ServiceClass.REAL_TIME if blind else ServiceClass.BEST_EFFORT
        closed = Closed("best-effort", parse_lengths(BEST_EFFORT), self.in_flight, self.mode, service=service)
        return Synthetic((stream,), closed=(closed,))

    def cells(
        self, variant: Variant, of: System, rates: Sequence[float], options: Options, *, seeds: int
    ) -> list[Cell]:
        workload = self.workload(blind=variant is BLIND)
        return cells(of, workload, rates, options, seeds=options.seeds(seeds), slo=SLO)


SHAREGPT = Load()


@cache
def lengths(dataset: str) -> Lengths:
    """Return the lengths of real-time requests; if their file is missing, the built-in ones."""
    file, built_in = _LENGTHS[dataset]
    folder = os.environ.get("SKIPJOIN_TRACES")
    if folder is not None and (path := Path(folder) / file).exists():
        return parse_lengths(f"trace:{path}")
    print(f"SKIPJOIN_TRACES has no {file}: lengths are {built_in}", file=sys.stderr)
    return parse_lengths(built_in)


def system(variant: Variant, model: str = "opt-13b", *, depth: int = 1, **params: Value) -> System:
    """Return the variant on the paper's GPUs for a model with `depth` plans in flight; `params` are the recipe's."""
    given = replace(variant, params={**variant.params, **params})
    return given.on(MACHINES[model], pipeline_depth=depth)


def window(options: Options, times: float = TIMES) -> Options:
    return lasting(options, times)


def records_of(plans: Mapping[tuple[Any, ...], Kept], *labels: str) -> list[Record]:
    """Return the records of plans whose keys are the values of the labels, with a part per class."""
    return [
        {**dict(zip(labels, key, strict=True)), **with_classes(record)}
        for key, plan in plans.items()
        for record in plan.records
    ]


_CLASSES = {"real_time": DEFAULT, "best_effort": "best-effort"}


def with_classes(record: Record) -> Record:
    """Return a record with the figures of both classes, even if the scheduler ignores classes."""
    streams = record.get("classes", {DEFAULT: record})
    parts = {name: streams[stream] for name, stream in _CLASSES.items() if stream in streams}
    kept = ("requests", "window", "normalized_latency_s", "ttft_s", "tpot_s", "slo", "wait_s")
    own = {name: value for name, value in record.items() if name not in ("classes", "services")}
    return own | {name: {field: part[field] for field in kept} for name, part in parts.items()}


def said(systems: Sequence[System], loads: Sequence[Load], options: Options, *, seeds: int = 1) -> Result:
    closed = sorted({(load.in_flight, load.mode.value) for load in loads if load.in_flight})
    texts = [f"{size} in flight (mode={mode})" for size, mode in closed]
    note = f"Best effort: {BEST_EFFORT}, {', '.join(texts)}." if texts else "No best-effort requests."
    datasets = dict.fromkeys(load.dataset for load in loads)
    workloads = [Load(name).workload(blind=False) for name in datasets]
    return settings_of(systems, workloads, options, seeds=seeds, note=note)


# A test checks that no request of a result is unfinished.
KEPT = ("real_time.requests.unfinished",)
LATENCY, BATCHED = "real_time.normalized_latency_s.mean", "best_effort.window.throughput_rps"
TTFT_KEPT, TPOT_KEPT = "real_time.slo.ttft_attained", "real_time.slo.tpot_attained"


def all_tokens(record: Record) -> float:
    """Return the output tokens per second of both classes, of requests that finished during the arrivals."""
    return float(sum(record[name]["window"]["throughput_tps"] for name in _CLASSES if name in record))


def evicted(record: Record) -> float:
    """Return how often a request lost device KV, in part or in whole."""
    return float(sum(count for how, count in record["kv"]["preemptions"].items() if how != "pause"))


FIELDS: Mapping[str, Column] = {
    "s/token": LATENCY,
    "TTFT kept": TTFT_KEPT,
    "TPOT kept": TPOT_KEPT,
    "best effort req/s": BATCHED,
    "real time req/s": "real_time.window.throughput_rps",
    "tokens/s, both": all_tokens,
    "KV used": "kv.used_mean",
    "evicted": evicted,
}


def side_by_side(title: str, records: Sequence[Record], keys: Sequence[str], column: Column) -> Result:
    """Return a table with a column per variant and a row per combination of the keys' values, as means."""
    names = list(dict.fromkeys(record["variant"] for record in records))
    rows = [
        (*key, *(mean_of(pick(some, variant=name), column) for name in names))
        for key, some in grouped(records, keys).items()
    ]
    return table(title, (*heads(keys), *names), rows)


def value_of(record: Record, column: Column) -> float:
    return column(record) if callable(column) else field_value(record, column)


def changes(records: Sequence[Record], name: str, column: Column, base: str = BLIND.name) -> list[float]:
    """Return the relative changes of a variant's figure from that of `base`, for each run that both have."""
    others = {_run(record): value_of(record, column) for record in pick(records, variant=base)}
    mine = {_run(record): value_of(record, column) for record in pick(records, variant=name)}
    return [value / others[run] - 1 for run, value in mine.items()]


def _run(record: Record) -> tuple[object, ...]:
    """Return what identifies a run across variants."""
    workload = record["workload"]
    return (record["model"], record["lengths"], workload["rate_rps"], workload["seed"], workload["duration_s"])


def against_rate(records: Sequence[Record], fields: Mapping[str, str], names: Sequence[str]) -> Figure:
    """Draw a column of panels per model, a row per field, and in each a line per variant; `fields` maps labels."""
    models = list(dict.fromkeys(record["model"] for record in records))
    figure = style.new_figure(style.WIDE_IN, 0.6 + 1.9 * len(fields))
    for (label, field), line in zip(
        fields.items(), figure.subplots(len(fields), len(models), squeeze=False), strict=True
    ):
        for model, axes in zip(models, line, strict=True):
            curves(axes, pick(records, model=model), names, field, by="variant")
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1.05 if field.endswith("attained") else None)
            axes.set_title(model)
            axes.set_xlabel("real-time arrival rate (req/s)")
        line[0].set_ylabel(label)
    legend_of(figure, figure.axes[0])
    return figure
