"""ALISE figure 6 (and figure 2, its panel of OPT-13B on ShareGPT): mean normalized latency by rate."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.alise.setting import BOUND, KEPT, NEAR_TRUE, REGRESSED, V100
from papers.figures.panels import Panels
from papers.figures.report import latencies, main, settings_of
from papers.figures.runs import Kept, Options, Result, Rising, cells, pick, poisson, run_plans
from papers.figures.variants import lasting, named, plain

VARIANTS = (*plain("orca", "orca-exact", "fcfs", "fastserve"), NEAR_TRUE, *REGRESSED, *plain("alise-oracle"))
MODELS, DATASETS = ("opt-2.7b", "opt-6.7b", "opt-13b"), ("sharegpt", "alpaca")
PANELS = Panels(MODELS, DATASETS, [variant.name for variant in VARIANTS], by="variant")
# Rates around the capacities: 9.8, 4.5 and 0.89 req/s on ShareGPT, and 122, 57 and 22 on Alpaca.
RATES = {
    ("opt-2.7b", "sharegpt"): (10.0, 16.0, 26.0),
    ("opt-6.7b", "sharegpt"): (4.0, 5.5, 8.0),
    ("opt-13b", "sharegpt"): (0.7, 0.9, 1.2, 1.7),
    ("opt-2.7b", "alpaca"): (120.0, 180.0, 280.0),
    ("opt-6.7b", "alpaca"): (56.0, 80.0, 120.0),
    ("opt-13b", "alpaca"): (20.0, 25.0, 32.0, 45.0),
}
# Durations, in multiples of 300 s.
LASTING = {
    ("opt-2.7b", "sharegpt"): 0.3,
    ("opt-6.7b", "sharegpt"): 0.6,
    ("opt-13b", "sharegpt"): 2.0,
    ("opt-2.7b", "alpaca"): 0.1,
    ("opt-6.7b", "alpaca"): 0.1,
    ("opt-13b", "alpaca"): 0.2,
}
# ORCA reserves the rest of the context for every request and reaches the bound much earlier than the others.
ORCA_SHARE = {
    ("opt-2.7b", "sharegpt"): 0.6,
    ("opt-6.7b", "sharegpt"): 0.4,
    ("opt-13b", "sharegpt"): 0.12,
    ("opt-2.7b", "alpaca"): 0.35,
    ("opt-6.7b", "alpaca"): 0.2,
    ("opt-13b", "alpaca"): 0.035,
}
RATIOS = [
    (NEAR_TRUE.name, "fcfs"),
    (REGRESSED[1].name, "fcfs"),
    (NEAR_TRUE.name, "fastserve"),
    (NEAR_TRUE.name, "orca"),
]


def measure(options: Options) -> Result:
    plans = curves_of(options)
    run_plans("figure06", [plan for _, plan in plans], options)
    records = named(plans)
    durations = "; ".join(
        f"{model} {dataset} {times * options.duration_s:g} s" for (model, dataset), times in LASTING.items()
    )
    return {
        "settings": settings_of(
            [variant.on(V100[model]) for model in MODELS for variant in VARIANTS],
            [poisson(dataset) for dataset in DATASETS],
            options,
            note=f"Durations: {durations}.",
        ),
        "tables": [
            PANELS.read_off(records, BOUND, RATIOS),
            *(
                latencies(
                    f"Latencies: {model}, {dataset}",
                    pick(records, model=model, lengths=dataset),
                    PANELS.names,
                    by="variant",
                )
                for dataset in DATASETS
                for model in MODELS
            ),
        ],
        "records": records,
    }


def curves_of(options: Options) -> list[tuple[str, Kept]]:
    plans = []
    for (model, dataset), rates in RATES.items():
        for variant in VARIANTS:
            share = ORCA_SHARE[model, dataset] if variant.recipe == "orca" else 1.0
            asked = [round(share * rate, 3) for rate in options.some(rates)]
            extent = lasting(options, LASTING[model, dataset])
            found = cells(variant.on(V100[model]), poisson(dataset), asked, extent)
            plans.append((variant.name, Rising(found, BOUND)))
    return plans


def draw(result: Result) -> Mapping[str, Figure]:
    return {"latency.png": PANELS.draw(result["records"], "normalized_latency_s.mean", 0.2, (0.01, 10))}


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        measure,
        draw,
        keeps=(*KEPT, "normalized_latency_s.mean"),
        docs={"latency.png": "alise-latency.png"},
    )
