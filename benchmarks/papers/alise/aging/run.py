"""Effect of aging on latencies with a stream of long requests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from dataclasses import replace

from matplotlib.figure import Figure

from papers.alise.setting import A100, NEAR_TRUE
from papers.figures.pictures import legend_of, look
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Options, Result, cells, grid, mean, pick, run_plans
from papers.figures.variants import lasting, named, plain
from skipjoin.report.plots import style
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import synthetic

AGINGS_S = (0.0, 800.0, 400.0, 200.0, 100.0, 25.0)
RATE_RPS, LASTING = 3.0, 3.0
WORKLOAD = synthetic("sharegpt", "poisson", ["name=long,share=0.02,lengths=uniform:64-128,1200-1800,arrivals=poisson"])
FIELDS = {
    "s/token": "normalized_latency_s.mean",
    "JCT s": "jct_s.mean",
    "P99 JCT s": "jct_s.p99",
    "longest JCT s": "longest_jct_s",
    "long: JCT s": "classes.long.jct_s.mean",
    "long: P99 JCT s": "classes.long.jct_s.p99",
    "TTFT s": "ttft_s.mean",
    "P95 TTFT s": "ttft_s.p95",
}


def systems() -> dict[str, System]:
    of = NEAR_TRUE.on(A100)
    aged = {f"{aging_s:g}": replace(of, recipe_params={"aging_s": aging_s}) for aging_s in AGINGS_S}
    return aged | {variant.name: variant.on(A100) for variant in plain("fastserve", "fcfs")}


def measure(options: Options) -> Result:
    extent = lasting(options, LASTING)
    plans = {name: grid(cells(of, WORKLOAD, [RATE_RPS], extent)) for name, of in systems().items()}
    run_plans("aging", list(plans.values()), options)
    records = named(plans)
    rows = [(name, *(mean(pick(records, variant=name), field) for field in FIELDS.values())) for name in plans]
    return {
        "settings": settings_of(list(systems().values()), [WORKLOAD], extent),
        "tables": [table(f"Latencies by aging, {RATE_RPS:g} req/s", ("aging_s", *FIELDS), rows)],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    rows = {row[0]: row[1:] for row in result["tables"][0]["rows"]}
    names = list(FIELDS)
    figure = style.new_figure(style.WIDE_IN, 2.6)
    panels = figure.subplots(1, 2)
    ticks = [f"{aging_s:g}" for aging_s in AGINGS_S]
    for axes, field in zip(panels, ("s/token", "longest JCT s"), strict=True):
        place = names.index(field)
        axes.plot(ticks, [rows[tick][place] for tick in ticks], "o-", color=look("alise").color, label="alise")
        for name in ("fastserve", "fcfs"):
            axes.axhline(rows[name][place], color=look(name).color, linestyle=look(name).dash, label=name)
        axes.set(xlabel="aging_s", ylabel=field, ylim=(0, None))
    legend_of(figure, panels[0])
    return {"aging.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
