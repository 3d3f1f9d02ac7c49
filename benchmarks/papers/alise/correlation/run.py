"""ALISE and `fastserve` by the accuracy of forecasts, and with outputs of equal length."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.alise.setting import A100, KEPT, alise
from papers.figures.pictures import legend_of, look
from papers.figures.report import latencies, main, settings_of
from papers.figures.runs import Options, Result, cells, grid, mean, pick, poisson, run_plans
from papers.figures.shapes import held
from papers.figures.variants import lasting, named, plain
from skipjoin.report.plots import style

RHOS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BY_RHO = (*(alise(f"regress:{rho:g}") for rho in RHOS), *plain("fastserve", "fcfs"))
EQUAL = (alise("oracle"), alise("noise:0.4"), alise("prior"), *plain("fastserve", "fcfs"))
RATE_RPS, EQUAL_RPS, SEEDS, LASTING = 4.5, 3.5, 2, 0.4


def measure(options: Options) -> Result:
    extent, alike = lasting(options, LASTING), held("sharegpt", prompt=False, output=True)
    groups = [(BY_RHO, poisson("sharegpt"), RATE_RPS), (EQUAL, alike, EQUAL_RPS)]
    plans = [
        {
            variant.name: grid(cells(variant.on(A100), workload, [rate], extent, seeds=options.seeds(SEEDS)))
            for variant in variants
        }
        for variants, workload, rate in groups
    ]
    run_plans("correlation", [plan for of_group in plans for plan in of_group.values()], options)
    by_rho, equal = (named(of_group) for of_group in plans)
    return {
        "settings": settings_of(
            [variant.on(A100) for variants, _, _ in groups for variant in variants],
            [workload for _, workload, _ in groups],
            extent,
            seeds=SEEDS,
        ),
        "tables": [
            latencies("By correlation", by_rho, [variant.name for variant in BY_RHO], by="variant"),
            latencies("Outputs of equal length", equal, [variant.name for variant in EQUAL], by="variant"),
        ],
        "records": by_rho + equal,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    records = pick(result["records"], lengths="sharegpt")
    figure = style.new_figure(style.WIDE_IN, 2.6)
    panels = figure.subplots(1, 2)
    for axes, field in zip(panels, ("normalized_latency_s.mean", "ttft_s.p95"), strict=True):
        values = [mean(pick(records, variant=variant.name), field) for variant in BY_RHO[: len(RHOS)]]
        axes.plot(RHOS, values, "o-", color=look("alise").color, label="alise")
        for name in ("fastserve", "fcfs"):
            level = mean(pick(records, variant=name), field)
            axes.axhline(level, color=look(name).color, linestyle=look(name).dash, label=name)
        axes.set(xlabel="correlation of the logarithms", ylabel=style.field_label(field), yscale="log")
    legend_of(figure, panels[0])
    return {"correlation.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, "normalized_latency_s.mean", "ttft_s.p95", "prediction.r_log"))
