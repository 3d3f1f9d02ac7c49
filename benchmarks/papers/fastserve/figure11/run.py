"""FastServe figure 11: mean normalized latency by rate for three models on two datasets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.panels import STARTS, Searches, draw_panels, read_off
from papers.fastserve.setting import MACHINES, MEAN_BOUND, RECIPES, system
from papers.figures.report import main, settings_of
from papers.figures.runs import SEEDS, Kept, Options, Result, cells, grid, poisson, run_plans

# Six rates around the rate at which `fcfs` reaches the bound, for each model and dataset.
RATES = {
    ("opt-13b", "sharegpt"): (1.5, 2.6, 3.2, 3.8, 4.6, 5.6),
    ("opt-66b", "sharegpt"): (0.9, 1.5, 1.9, 2.2, 2.7, 3.3),
    ("opt-175b", "sharegpt"): (2.4, 3.6, 4.4, 5.2, 6.4, 8.0),
    ("opt-13b", "alpaca"): (30.0, 50.0, 62.0, 68.0, 75.0, 85.0),
    ("opt-66b", "alpaca"): (24.0, 34.0, 40.0, 44.0, 48.0, 54.0),
    ("opt-175b", "alpaca"): (40.0, 55.0, 64.0, 70.0, 78.0, 88.0),
}
# Static batches reach the bound much earlier: their rates are this share of the others.
STATIC_SHARE = {"sharegpt": 0.25, "alpaca": 0.1}


def curves_of(options: Options) -> list[Kept]:
    plans = []
    for (model, dataset), rates in RATES.items():
        for recipe in RECIPES:
            share = STATIC_SHARE[dataset] if recipe == "static" else 1.0
            asked = [round(share * rate, 3) for rate in options.some(rates)]
            seeds = options.seeds(SEEDS if (model, dataset) == ("opt-13b", "sharegpt") else 1)
            plans.append(grid(cells(system(recipe, model), poisson(dataset), asked, options, seeds=seeds)))
    return plans


def measure(options: Options) -> Result:
    plans = curves_of(options)
    searches = Searches(MEAN_BOUND, options)
    run_plans("figure11", [*plans, *searches.plans], options)
    records = [record for plan in plans for record in plan.records]
    systems = [system(recipe, model) for model in MACHINES for recipe in RECIPES]
    systems += [system(recipe, batch_cap=cap) for cap in STARTS for recipe in RECIPES]
    return {
        "settings": settings_of(systems, [poisson("sharegpt"), poisson("alpaca")], options),
        "tables": [*searches.tables(), read_off(records, MEAN_BOUND)],
        "tried": searches.tried(),
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    return {"latency.png": draw_panels(result["records"], "normalized_latency_s.mean", 0.3)}


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        measure,
        draw,
        keeps=("normalized_latency_s.mean", "normalized_latency_s.p95"),
    )
