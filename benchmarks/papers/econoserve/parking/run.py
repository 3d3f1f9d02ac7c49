"""Parking: waiting generations leave the reserve for CPU memory when a prompt needs their blocks.

OPT-13B with this project's parameters, with and without `parking`, for ten minutes at 0.9, 1 and 1.2 times the capacity
of `fcfs`: ShareGPT, the same with long prompts, Alpaca, and ShareGPT on a machine with steps of eight times the
length. Times to the first token are given by tenths of the requests, shortest prompts first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import DEFAULTS, SHAREGPT, SLO, TRACES, Trace, system
from papers.figures.pictures import bars
from papers.figures.report import Column, compared, main, settings_of
from papers.figures.runs import Options, Result, mean, pick, poisson, slim
from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape
from skipjoin.observe.record import Record
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.workload import Synthetic, synthetic

LASTING_S, SEEDS = 600.0, 3
LOADS = (0.9, 1.0, 1.2)
LONG = "name=long,share=0.15,lengths=uniform:1024-1800,16-200,arrivals=poisson"
SLOWER = 8
ALPACA = TRACES["alpaca"]


@dataclass(frozen=True, slots=True)
class Case:
    """Requests and a machine; `fcfs` computes up to `capacity_rps`. Moves of KV are as fast on a slower machine."""

    workload: Synthetic
    capacity_rps: float
    trace: Trace = SHAREGPT  # whose forecasts have as large errors
    slower: int = 1
    times: float = 1.0  # duration in multiples of the others'


CASES = {
    "ShareGPT": Case(poisson("sharegpt"), SHAREGPT.capacity_rps["opt-13b"]),
    "long prompts": Case(synthetic("sharegpt", "poisson", [LONG]), 3.3),
    "slower": Case(poisson("sharegpt"), SHAREGPT.capacity_rps["opt-13b"] / SLOWER, slower=SLOWER, times=2.0),
    "Alpaca": Case(poisson("alpaca"), ALPACA.capacity_rps["opt-13b"], ALPACA, times=0.2),
}
WORKLOADS = [CASES[name].workload for name in ("ShareGPT", "Alpaca")]


@dataclass(frozen=True, slots=True)
class Slower:
    """Cost of a machine that computes `times` as long."""

    cost: CostModel
    times: int

    @property
    def revision(self) -> int:
        return self.cost.revision

    @property
    def margin(self) -> float:
        return self.cost.margin

    def step(self, shape: StepShape) -> float:
        return self.times * self.cost.step(shape)

    def transfer(self, blocks: float) -> float:
        return self.cost.transfer(blocks)


def cell(case: Case, load: float, seed: int, options: Options, *, parking: bool) -> Cell:
    variant = replace(DEFAULTS, params={**DEFAULTS.params, "parking": parking})
    of = system(variant, case.trace)
    if case.slower > 1:
        of = replace(of, cost=Slower(of.cost, case.slower))
    lasting_s = (options.lasting_s or LASTING_S) * case.times
    return Cell(of, case.workload, Extent(round(load * case.capacity_rps, 3), lasting_s, seed), SLO)


def simulated(of: Cell) -> Record:
    """Return the record with means by tenths of the requests, shortest prompts first."""
    done: list[Record] = []

    def keep(requests: Iterator[Record]) -> None:
        done.extend(request for request in requests if request["error"] is None)

    record = run(of, on_requests=keep)
    done.sort(key=lambda request: request["prompt_tokens"])
    ends = [len(done) * place // 10 for place in range(11)]
    tenths = [done[begin:end] for begin, end in pairwise(ends)]
    by_tenth = {
        name: [fmean(request[field] - request["sent_s"] for request in tenth) if tenth else None for tenth in tenths]
        for name, field in (("ttft_s", "first_token_s"), ("jct_s", "last_token_s"))
    }
    return {**slim(record), "tenths": by_tenth}


COLUMNS: dict[str, Column] = {
    "attainment": "slo.jct_attained",
    "JCT s": "jct_s.mean",
    "P99 JCT s": "jct_s.p99",
    "TTFT s": "ttft_s.mean",
    "P99 TTFT s": "ttft_s.p99",
    "of the longest tenth: TTFT s": lambda record: record["tenths"]["ttft_s"][-1],
    "JCT s there": lambda record: record["tenths"]["jct_s"][-1],
    "decision ms": "decision_ms.mean",
}


def measure(options: Options) -> Result:
    asked = [
        (
            {"case": name, "load": load, "parking": parking},
            cell(of, load, seed, options, parking=parking == "on"),
        )
        for name, of in CASES.items()
        for load in options.some(LOADS)
        for parking in ("off", "on")
        for seed in options.seeds(SEEDS)
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(simulated, [of for _, of in asked])
        records = [{**labels, **record} for (labels, _), record in zip(asked, found, strict=True)]
    note = (
        "On the slower machine runs last twice, and with Alpaca a fifth as long. Loads are multiples of the capacity."
    )
    lasting = replace(options, duration_s=options.lasting_s or LASTING_S)
    return {
        "settings": settings_of([of.system for _, of in asked], WORKLOADS, lasting, SEEDS, note),
        "tables": [compared("Means over seeds", records, ("case", "load", "parking"), COLUMNS)],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    records: Sequence[dict[str, Any]] = pick(result["records"], load=max(LOADS))
    figure = style.new_figure(style.WIDE_IN, 2.6)
    shown = {"attainment": "slo.jct_attained", "P99 TTFT s": "ttft_s.p99"}
    for axes, (label, field) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        series = {
            f"parking={parking}": [mean(pick(records, case=case, parking=parking), field) for case in CASES]
            for parking in ("off", "on")
        }
        bars(axes, list(CASES), series, dict(zip(series, style.COLORS, strict=False)))
        axes.set_title(label)
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"parking.png": figure}


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        measure,
        draw,
        keeps=("load", "tenths", "requests.finished", *(field for field in COLUMNS.values() if isinstance(field, str))),
    )
