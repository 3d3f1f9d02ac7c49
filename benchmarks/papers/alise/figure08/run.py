"""ALISE figure 8: KV management under memory pressure.

OPT-13B on a V100 with 32 GB, near-true forecasts, Alpaca for 120 s and ShareGPT for 300 s. KV is swapped proactively by
estimated wait time (`alise`), swapped when blocks run out (`alise-reactive`), dropped and recomputed
(`alise-recompute`), or new requests are deferred (`alise-defer`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.alise.setting import KEPT, NEAR_TRUE, V100
from papers.figures.pictures import curves, legend_of
from papers.figures.report import latencies, main, settings_of, table
from papers.figures.runs import Options, Result, cells, grid, mean, pick, poisson, run_plans
from papers.figures.variants import Variant, lasting, named
from skipjoin.observe.record import preempted
from skipjoin.report.plots import style

RECIPES = ("alise", "alise-reactive", "alise-recompute", "alise-defer")
VARIANTS = tuple(Variant(recipe, recipe, NEAR_TRUE.predictor) for recipe in RECIPES)
# Rates around the capacities of 22 and 0.89 req/s, and durations in multiples of 300 s.
RATES = {"alpaca": (14.0, 18.0, 21.0, 24.0, 28.0), "sharegpt": (0.5, 0.65, 0.8, 0.95, 1.1)}
LASTING = {"alpaca": 0.4, "sharegpt": 1.0}
COLUMNS = (
    "lengths",
    "req/s",
    "recipe",
    "s/token",
    "to alise",
    "latency s",
    "to alise",
    "preemptions",
    "recomputed tokens",
)


def measure(options: Options) -> Result:
    plans = [
        (
            variant.name,
            grid(
                cells(
                    variant.on(V100["opt-13b"]),
                    poisson(dataset),
                    options.some(rates),
                    lasting(options, LASTING[dataset]),
                    seeds=options.seeds(2),
                )
            ),
        )
        for dataset, rates in RATES.items()
        for variant in VARIANTS
    ]
    run_plans("figure08", [plan for _, plan in plans], options)
    records = named(plans)
    return {
        "settings": settings_of(
            [variant.on(V100["opt-13b"]) for variant in VARIANTS],
            [poisson(dataset) for dataset in RATES],
            options,
            seeds=2,
            note=f"Alpaca's requests arrive for {LASTING['alpaca'] * options.duration_s:g} s.",
        ),
        "tables": [
            table("Mean latency by the way to treat KV (paper: defer 1.8x, recompute 2.8x)", COLUMNS, _ratios(records)),
            *(latencies(f"Latencies: {dataset}", pick(records, lengths=dataset), RECIPES) for dataset in RATES),
        ],
        "records": records,
    }


def _ratios(records: list[Result]) -> list[tuple[object, ...]]:
    rows = []
    for dataset in RATES:
        of_dataset = pick(records, lengths=dataset)
        for rate in sorted({record["workload"]["rate_rps"] for record in of_dataset}):
            first = pick(of_dataset, recipe="alise", rate_rps=rate)
            for recipe in RECIPES:
                mine = pick(of_dataset, recipe=recipe, rate_rps=rate)
                values = [
                    value
                    for field in ("normalized_latency_s.mean", "jct_s.mean")
                    for value in (mean(mine, field), mean(mine, field) / mean(first, field))
                ]
                work = fmean(map(preempted, mine)), mean(mine, "kv.recomputed_tokens")
                rows.append((dataset, rate, recipe, *values, *work))
    return rows


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 3.0)
    panels = figure.subplots(1, 2)
    for axes, dataset in zip(panels, RATES, strict=True):
        curves(axes, pick(result["records"], lengths=dataset), RECIPES, "normalized_latency_s.mean")
        axes.set(title=dataset, xlabel="arrival rate (req/s)", ylim=(0, None))
    panels[0].set_ylabel(style.field_label("normalized_latency_s.mean"))
    legend_of(figure, panels[0])
    return {"kv-modes.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, "normalized_latency_s.mean"))
