"""ALISE table 3: more models, LLaMA-7B, LLaMA-13B and Pythia-12B."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from dataclasses import replace

from matplotlib.figure import Figure

from papers.alise.setting import BOUND, NEAR_TRUE, REGRESSED, V100
from papers.figures.panels import Panels
from papers.figures.pictures import bars, colors_of, legend_of
from papers.figures.report import latencies, main, settings_of, table
from papers.figures.runs import Kept, Options, Result, Rising, cells, grid, mean, pick, poisson, run_plans
from papers.figures.variants import Variant, lasting, named, plain
from skipjoin.report.plots import style

MODELS = ("llama-13b", "llama-7b", "pythia-12b")
VARIANTS = (*plain("orca", "fcfs", "fastserve"), NEAR_TRUE, REGRESSED[1])
PANELS = Panels(MODELS, ("sharegpt", "alpaca"), ("fcfs", NEAR_TRUE.name), by="variant")
PAPERS_RPS = {"alpaca": 30.0, "sharegpt": 2.0}
# Durations in multiples of 300 s.
LASTING = {"alpaca": 0.2, "sharegpt": 1.0}
RATES = {
    ("llama-13b", "sharegpt"): (0.8, 1.1, 1.6),
    ("llama-7b", "sharegpt"): (4.4, 6.0, 9.0),
    ("pythia-12b", "sharegpt"): (1.4, 2.0, 3.0),
    ("llama-13b", "alpaca"): (20.0, 28.0, 45.0),
    ("llama-7b", "alpaca"): (57.0, 80.0, 120.0),
    ("pythia-12b", "alpaca"): (30.0, 42.0, 64.0),
}


def measure(options: Options) -> Result:
    asked, curves = at_the_papers_rates(options), curves_of(options)
    run_plans("table3", [plan for _, plan in (*asked, *curves)], options)
    finished, records = named(asked), named(curves)
    return {
        "settings": settings_of(
            [variant.on(V100[model]) for model in MODELS for variant in VARIANTS],
            [poisson(dataset) for dataset in LASTING],
            options,
            note=f"Alpaca's requests arrive for {LASTING['alpaca'] * options.duration_s:g} s.",
        ),
        "tables": [
            _finished(finished),
            PANELS.read_off(records, BOUND, [(NEAR_TRUE.name, "fcfs")]),
            *(
                latencies(
                    f"Latencies: {model}, {dataset}",
                    pick(records, model=model, lengths=dataset),
                    PANELS.names,
                    by="variant",
                )
                for model in MODELS
                for dataset in PANELS.datasets
            ),
        ],
        "records": records,
    }


def at_the_papers_rates(options: Options) -> list[tuple[str, Kept]]:
    return [
        (variant.name, grid([replace(cell, extent=replace(cell.extent, until_s=extent.duration_s)) for cell in found]))
        for dataset, rate in PAPERS_RPS.items()
        for model in MODELS
        for variant in VARIANTS
        for extent in [lasting(options, LASTING[dataset])]
        for found in [cells(variant.on(V100[model]), poisson(dataset), [rate], extent)]
    ]


def curves_of(options: Options) -> list[tuple[str, Kept]]:
    by_name = {variant.name: variant for variant in VARIANTS}
    return [
        (
            name,
            Rising(
                cells(by_name[name].on(V100[model]), poisson(dataset), options.some(rates), extent),
                BOUND,
            ),
        )
        for (model, dataset), rates in RATES.items()
        for name in PANELS.names
        for extent in [lasting(options, LASTING[dataset])]
    ]


def _finished(records: list[Result]) -> Result:
    rows = []
    for dataset, rate in PAPERS_RPS.items():
        for model in MODELS:
            found = [
                mean(pick(records, variant=variant.name, model=model, lengths=dataset), "requests.finished")
                / pick(records, lengths=dataset)[0]["workload"]["duration_s"]
                for variant in VARIANTS
            ]
            rows.append((dataset, rate, model, *found, found[_place(NEAR_TRUE)] / found[_place(plain("fcfs")[0])]))
    columns = (
        "lengths",
        "arriving req/s",
        "model",
        *(variant.name for variant in VARIANTS),
        f"{NEAR_TRUE.name} to fcfs",
    )
    return table("Requests finished per second until the last has arrived (paper: 1.34x to 1.49x)", columns, rows)


def _place(variant: Variant) -> int:
    return [one.name for one in VARIANTS].index(variant.name)


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.8)
    panels = figure.subplots(1, 2)
    names = ("orca", "fcfs", "fastserve", NEAR_TRUE.name)
    for axes, dataset in zip(panels, PAPERS_RPS, strict=True):
        rows = [row for row in result["tables"][0]["rows"] if row[0] == dataset]
        columns = result["tables"][0]["columns"]
        bars(axes, MODELS, {name: [row[columns.index(name)] for row in rows] for name in names}, colors_of(names))
        axes.set(title=f"{dataset}, {PAPERS_RPS[dataset]:g} req/s arriving", ylabel="finished per second")
    legend_of(figure, panels[0])
    return {"models.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
