"""ALISE beside `fastserve` and `fcfs` in the setting of FastServe's evaluation: largest rates, searched to 2 %.

    python benchmarks/alise/rates/run.py [--quick]

OPT-13B on one A100 with 40 GB, 11 GiB of KV; 30 minutes of ShareGPT as in ALISE's evaluation, 2 minutes of Alpaca; one
seed; `alise` with near-true forecasts, with aging and without. The bound is that of FastServe's figure 11, a mean
normalized latency of 0.3 s per token.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from dataclasses import replace

from matplotlib.figure import Figure

from alise.setting import A100, FASTSERVE_BOUND, NEAR_TRUE, lasting, plain
from figures.pictures import bars, colours_of, legend_of
from figures.report import main, rates_table, settings_of
from figures.runs import Options, Result, Search, cells, poisson, run_plans
from skipjoin.bench.plots import style

UNAGED = replace(NEAR_TRUE, name=f"{NEAR_TRUE.name}, aging 0", params={"aging": 0.0})
VARIANTS = (*plain("fcfs", "fastserve"), NEAR_TRUE, UNAGED)
# Where the searches start, in req/s, and durations in multiples of 300 s.
STARTS = {"sharegpt": (3.0, 3.4, 3.7, 4.6), "alpaca": (68.0, 78.0, 95.0, 95.0)}
LASTING = {"sharegpt": 6.0, "alpaca": 0.4}


def measure(options: Options) -> Result:
    searches = {
        dataset: {
            variant.name: Search(
                cells(variant.on(A100), poisson(dataset), [start], lasting(options, LASTING[dataset]), seeds=[0]),
                FASTSERVE_BOUND,
            )
            for variant, start in zip(VARIANTS, starts, strict=True)
        }
        for dataset, starts in STARTS.items()
    }
    run_plans("rates", [search for found in searches.values() for search in found.values()], options)
    return {
        "settings": settings_of(
            [variant.on(A100) for variant in VARIANTS],
            [poisson(dataset) for dataset in STARTS],
            options,
            seeds=1,
            note="; ".join(f"{name} for {times * options.duration_s:g} s" for name, times in LASTING.items()),
        ),
        "tables": [
            rates_table(f"Largest rate with {FASTSERVE_BOUND}: opt-13b, {dataset}", found, ("fcfs", "fastserve"))
            for dataset, found in searches.items()
        ],
        "rates": {
            dataset: {name: search.rate.rate_rps if search.rate else 0.0 for name, search in found.items()}
            for dataset, found in searches.items()
        },
        "records": [
            {"variant": name, **record}
            for found in searches.values()
            for name, search in found.items()
            for record in search.records
        ],
    }


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.NARROW_IN, 2.8)
    panels = figure.subplots(1, len(STARTS))
    names = [variant.name for variant in VARIANTS]
    for axes, (dataset, rates) in zip(panels, result["rates"].items(), strict=True):
        bars(axes, [""], {name: [rates[name]] for name in names}, colours_of(names))
        axes.set(title=dataset, ylabel="largest rate (req/s)")
    legend_of(figure, panels[0])
    return {"rates.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
