"""Settings of EconoServe's evaluation: machines, traces and variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from papers.figures.report import settings_of
from papers.figures.runs import Kept, Options, Result, cells, poisson, result_of
from papers.figures.variants import Variant, lasting
from papers.recipes import LABELLED
from skipjoin.observe.record import Record, Slo
from skipjoin.options import Value
from skipjoin.recipes import Forecasts
from skipjoin.sim.experiments.cell import Cell
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.system import System

# Objective: twice the time at light load (section 4).
SLO = Slo(jct_scale=2.0)
# Sections 2.1 and 4: one, two and eight A100s with 80 GB and their KV; blocks as in section 1.
MACHINES = {
    "opt-13b": Machine(model="opt-13b", hardware="a100-80gb", kv_gib=12.0, block_size=32),
    "llama-33b": Machine(model="llama-33b", hardware="a100-80gb:tp2", kv_gib=19.2, block_size=32),
    "opt-175b": Machine(model="opt-175b", hardware="a100-80gb:tp8", kv_gib=264.0, block_size=32),
}
OPT_13B = MACHINES["opt-13b"]
# Prompts of BookCorpus exceed the positions of these models. The cost model has no such limit.
_BOOKS_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths of requests and the paper's parameters for them (sections 2.3 and 4).

    Attributes:
        noise: Log-normal error of forecasts with which as many requests outgrow a padded forecast as in the paper
            (22.5, 26.8 and 30.2 %, section 2.3).
        times: Duration in multiples of an evaluation's.
        capacity_rps: Capacity of `fcfs` by model, measured by `saturated`; a load of 1 is the capacity.
    """

    lengths: str
    padding: float
    buffer: float
    reserve: float
    noise: float
    times: float
    capacity_rps: Mapping[str, float]

    @property
    def params(self) -> dict[str, Value]:
        # The paper moves no KV to CPU memory.
        return {"padding": self.padding, "buffer": self.buffer, "reserve": self.reserve, "parking": False}


TRACES = {
    trace.lengths: trace
    for trace in (
        Trace("alpaca", 0.10, 0.15, 0.02, 0.13, 0.08, {"opt-13b": 70.0, "llama-33b": 53.0, "opt-175b": 40.0}),
        Trace("sharegpt", 0.15, 0.15, 0.03, 0.23, 0.3, {"opt-13b": 3.7, "llama-33b": 2.6, "opt-175b": 4.5}),
        Trace("bookcorpus", 0.20, 0.10, 0.04, 0.35, 0.8, {"opt-13b": 0.3, "llama-33b": 0.19, "opt-175b": 0.39}),
    )
}
SHAREGPT = TRACES["sharegpt"]

NOISE = "noise"


def variants(*names: str) -> tuple[Variant, ...]:
    """Return variants of recipes; those that read forecasts get forecasts with the trace's noise."""
    return tuple(
        Variant(name, name, NOISE if LABELLED[name].forecasts is Forecasts.LEARNED else None) for name in names
    )


def known(variant: Variant) -> Variant:
    return variant if variant.predictor is None else replace(variant, predictor="oracle")


MULTIRES = ("multires", "synccoupled")
# The paper's SRTF, FastServe and vLLM have maximum allocation, and vLLM swaps.
BASELINES = variants("orca", "srpt", "srtf", "fastserve", "fastserve-max", "fcfs", "fcfs-swap", "sarathi", *MULTIRES)
ABLATIONS = variants("econoserve-d", "econoserve-sd", "econoserve-sdo", "econoserve")
SYNCED, ECONOSERVE = ABLATIONS[1], ABLATIONS[-1]
# This project's parameters instead of the paper's: three quarters of a forecast are reserved at first. Runs are without
# parking, which `parking` compares.
OURS = {"padding": -0.25, "buffer": 0.15, "reserve": 0.03}
DEFAULTS = Variant("econoserve, defaults", "econoserve", NOISE, OURS)
ORACLE, PRIOR = (Variant(f"econoserve, {name}", "econoserve", name) for name in ("oracle", "prior"))


# As DistServe: a prefill and a decode replica on two machines with 100 Gb/s between them (section 2.4).
SPLIT = Variant("split", "fcfs", settings={"replicas": 2, "prefill_replicas": 1, "network_gbps": 100.0})


def system(variant: Variant, trace: Trace, machine: Machine = OPT_13B, **params: Value) -> System:
    predictor = f"noise:{trace.noise}" if variant.predictor == NOISE else variant.predictor
    given = {**trace.params, **variant.params, **params}
    found = replace(variant, predictor=predictor, params=given).on(machine)
    return replace(found, max_model_len=_BOOKS_CONTEXT) if trace.lengths == "bookcorpus" else found


def loaded(
    of: System, trace: Trace, loads: Sequence[float], options: Options, *, seeds: int = 1, slo: Slo = SLO
) -> list[Cell]:
    rates = [round(load * trace.capacity_rps[of.model], 3) for load in loads]
    extent = lasting(options, trace.times)
    return cells(of, poisson(trace.lengths), rates, extent, seeds=options.seeds(seeds), slo=slo)


def labelled(records: Sequence[Record], **labels: object) -> list[Record]:
    return [{**labels, "load": _load(record), **record} for record in records]


def records_of(plans: Mapping[tuple[Any, ...], Kept], *labels: str) -> list[Record]:
    return [one for key, plan in plans.items() for one in labelled(plan.records, **dict(zip(labels, key, strict=True)))]


def of_figure09(options: Options, *parts: str) -> tuple[Result, list[Record]]:
    found = result_of("figure09", options)
    kept = ("model", "lengths", "load", "variant", "workload", *parts)
    return found["settings"], [{part: record[part] for part in kept} for record in found["records"]]


def decision_share(record: Record) -> float:
    return float(record["settings"]["decision_s"] * record["steps"] / record["duration_s"])


def _load(record: Record) -> float | None:
    """Return the load of a record, or None for lengths or a model that the paper does not have."""
    trace = TRACES.get(record["workload"]["lengths"])
    capacity_rps = None if trace is None else trace.capacity_rps.get(record["model"])
    return None if capacity_rps is None else round(record["workload"]["rate_rps"] / capacity_rps, 2)


def said(systems: Sequence[System], options: Options, *, seeds: int = 1, note: str = "") -> Result:
    durations = ", ".join(f"{name} {trace.times * options.duration_s:g} s" for name, trace in TRACES.items())
    note = f"Durations: {durations}. Loads are multiples of the capacity of fcfs. {note}".strip()
    return settings_of(systems, [poisson(name) for name in TRACES], options, seeds=seeds, note=note)


# Fields that most figures show.
LATENCY = {
    "s/token": "normalized_latency_s.mean",
    "JCT s": "jct_s.mean",
    "TTFT s": "ttft_s.mean",
    "attainment": "slo.jct_attained",
    "goodput req/s": "slo.goodput_rps",
}
UTILIZATION = {
    "req/s": "throughput_rps",
    "tokens/s": "throughput_tps",
    "KV used": "kv.used_mean",
    "KV allocated": "kv.allocated_mean",
    "forward": "forward.mean",
}
