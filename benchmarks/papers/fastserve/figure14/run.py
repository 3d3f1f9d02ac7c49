"""FastServe figure 14: four orderings at several ratios of input to output length.

OPT-13B with ShareGPT's lengths and prompts or outputs scaled down (scaled up, prompts would exceed the 2,048
positions). The rate is a multiple of the capacity of `fcfs` with the same lengths. Figures are mean normalized
latencies relative to the slowest recipe. All except `fcfs` swap KV proactively.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.setting import system
from papers.figures.pictures import bars, colors_of, legend_of
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Options, Result, capacities, cells, grid, mean, poisson, run_plans
from skipjoin.report.plots import style

RECIPES = ("fcfs", "mlfq", "fixed-priority", "fastserve")
SCALED = ("sharegpt*0.25,1", "sharegpt", "sharegpt*1,0.25", "sharegpt*1,0.0625", "sharegpt*1,0.03125")
LOADS = (1.0, 1.25)


def measure(options: Options) -> Result:
    workloads = [poisson(lengths) for lengths in SCALED]
    most = capacities("figure14", [(system("fcfs"), workload) for workload in workloads], options)
    plans = {
        (load, number, recipe): grid(cells(system(recipe), workload, [load * most[number]], options))
        for load in LOADS
        for number, workload in enumerate(workloads)
        for recipe in (*RECIPES, "srpt")
    }
    run_plans("figure14", list(plans.values()), options)
    tables = []
    for load in LOADS:
        rows = []
        for number, workload in enumerate(workloads):
            prompt, output = workload.streams[0].lengths.mean()
            latency = {
                recipe: mean(plans[load, number, recipe].records, "normalized_latency_s.mean")
                for recipe in (*RECIPES, "srpt")
            }
            slowest = max(latency[recipe] for recipe in RECIPES)
            over = [latency[recipe] / latency["fastserve"] for recipe in RECIPES if recipe != "fastserve"]
            relative = [latency[recipe] / slowest for recipe in RECIPES]
            rows.append((SCALED[number], prompt / output, load * most[number], slowest, *relative, *over,
                         latency["fastserve"] / latency["srpt"]))  # fmt: skip
        columns = ("lengths", "input:output", "req/s", "slowest s/token", *RECIPES,
                   "fcfs to fastserve", "mlfq to it", "fixed-priority to it", "fastserve to srpt")  # fmt: skip
        tables.append(table(f"Mean normalized latency relative to the slowest, load {load:g}", columns, rows))
    return {
        "settings": settings_of([system(recipe) for recipe in (*RECIPES, "srpt")], workloads, options),
        "tables": tables,
        "records": [record for plan in plans.values() for record in plan.records],
    }


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 4.6)
    panels = figure.subplots(len(LOADS), 1, sharex=True)
    for load, axes, one in zip(LOADS, panels, result["tables"], strict=True):
        series = {recipe: [row[4 + place] for row in one["rows"]] for place, recipe in enumerate(RECIPES)}
        bars(axes, [f"{row[1]:.2g}" for row in one["rows"]], series, colors_of(RECIPES))
        axes.set(ylabel="latency to the slowest's", title=f"load {load:g}", ylim=(0, 1.1))
    panels[-1].set_xlabel("mean input length / mean output length")
    legend_of(figure, panels[0])
    return {"orderings.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
