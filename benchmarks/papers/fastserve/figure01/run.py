"""FastServe figure 1: share of queueing in the latency, by the lengths that vary."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.setting import system
from papers.figures.pictures import bars, legend_of
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Options, Result, capacities, cells, grid, mean, run_plans
from papers.figures.shapes import held
from skipjoin.report.plots import style

LOADS, CAPS, DATASETS = (0.9, 1.0), (256, 16), ("sharegpt", "alpaca")
SHAPES = {
    "all equal": (True, True),
    "prompts vary": (False, True),
    "outputs vary": (True, False),
    "both vary": (False, False),
}
COLUMNS = ("lengths", "cap", "load", "req/s", "latency s", "queueing s", "share of queueing", "before the first step s")


def measure(options: Options) -> Result:
    cases = [
        (cap, shape, held(dataset, prompt=prompt, output=output))
        for cap in CAPS
        for dataset in DATASETS
        for shape, (prompt, output) in SHAPES.items()
    ]
    systems = [system("fcfs", batch_cap=cap) for cap, _, _ in cases]
    workloads = [workload for _, _, workload in cases]
    most = capacities("figure01", list(zip(systems, workloads, strict=True)), options)
    plans = [
        grid(cells(of, workload, [load * rate], options))
        for of, workload, rate in zip(systems, workloads, most, strict=True)
        for load in LOADS
    ]
    run_plans("figure01", plans, options)
    rows = []
    keys = [(cap, workload.streams[0].lengths.name, load) for cap, _, workload in cases for load in LOADS]
    for (cap, lengths, load), plan in zip(keys, plans, strict=True):
        records = plan.records
        latency, queueing = mean(records, "jct_s.mean"), mean(records, "breakdown_s.queueing")
        rate, before = records[0]["workload"]["rate_rps"], mean(records, "queue_s.mean")
        rows.append((lengths, cap, load, rate, latency, queueing, queueing / latency, before))
    return {
        "settings": settings_of(
            systems[:: len(systems) // len(CAPS)], workloads[: len(workloads) // len(CAPS)], options
        ),
        "tables": [table("Share of queueing in the mean latency under fcfs", COLUMNS, rows)],
        "records": [record for plan in plans for record in plan.records],
    }


def draw(result: Result) -> Mapping[str, Figure]:
    rows = result["tables"][0]["rows"]
    figure = style.new_figure(style.WIDE_IN, 4.2)
    panels = figure.subplots(len(CAPS), len(DATASETS), sharey=True, squeeze=False)
    for cap, line in zip(CAPS, panels, strict=True):
        for dataset, axes in zip(DATASETS, line, strict=True):
            mine = [row for row in rows if row[0].startswith(dataset) and row[1] == cap]
            series = {f"load {load:g}": [100 * row[6] for row in mine if row[2] == load] for load in LOADS}
            bars(axes, list(SHAPES), series, dict(zip(series, (style.SKY, style.BLUE), strict=True)))
            axes.set_title(f"{dataset}, batch cap {cap}")
            axes.tick_params(axis="x", labelsize=6)
            axes.set_ylim(0, 108)
        line[0].set_ylabel("queueing / latency (%)")
    legend_of(figure, panels[0][0])
    return {"queueing.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
