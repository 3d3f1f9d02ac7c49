"""Gains of int8 KV and of scheduling, measured separately."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from papers.alise.setting import A100, FASTSERVE_BOUND, NEAR_TRUE
from papers.figures.pictures import bars, legend_of
from papers.figures.report import latencies, main, settings_of, table
from papers.figures.runs import Options, Result, Search, cells, grid, pick, poisson, run_plans
from papers.figures.variants import Variant, lasting, plain
from skipjoin.report.plots import style
from skipjoin.sim.experiments.system import System

FCFS = plain("fcfs")[0]
KV = ("16-bit", "int8 in CPU memory", "int8 on both tiers")
TYPES: dict[str, dict[str, Any]] = {KV[0]: {}, KV[1]: {"swap_dtype": "int8"}, KV[2]: {"kv_cache_dtype": "int8"}}
CELLS = ((FCFS, KV[0]), (FCFS, KV[2]), (NEAR_TRUE, KV[0]), (NEAR_TRUE, KV[1]), (NEAR_TRUE, KV[2]))
# First rates of the searches, and a rate above the capacity of `fcfs` for the comparison of latencies.
STARTS = {"sharegpt": (3.4, 4.6, 6.5, 6.5, 8.0), "alpaca": (80.0, 90.0, 120.0, 120.0, 125.0)}
RATES = {"sharegpt": 4.5, "alpaca": 90.0}
# Durations in multiples of 300 s.
LASTING = {"sharegpt": 1.0, "alpaca": 0.2}


def system(variant: Variant, kv: str) -> System:
    return variant.on(replace(A100, **TYPES[kv]))


def measure(options: Options) -> Result:
    found = {
        (dataset, variant.name, kv): cells(
            system(variant, kv), poisson(dataset), [start], lasting(options, LASTING[dataset])
        )
        for dataset, starts in STARTS.items()
        for (variant, kv), start in zip(CELLS, starts, strict=True)
    }
    searches = {key: Search(first, FASTSERVE_BOUND) for key, first in found.items()}
    fixed = {
        key: grid([replace(cell, extent=replace(cell.extent, rate_rps=RATES[key[0]])) for cell in first])
        for key, first in found.items()
    }
    run_plans("int8", [*searches.values(), *fixed.values()], options)
    records = [
        {"variant": f"{name}, {kv}", **record} for (_, name, kv), plan in fixed.items() for record in plan.records
    ]
    rates = {
        dataset: {
            f"{variant.name}, {kv}": search.rate.rate_rps
            if (search := searches[dataset, variant.name, kv]).rate
            else 0.0
            for variant, kv in CELLS
        }
        for dataset in STARTS
    }
    names = [f"{variant.name}, {kv}" for variant, kv in CELLS]
    return {
        "settings": settings_of(
            [system(variant, kv) for variant, kv in CELLS],
            [poisson(dataset) for dataset in STARTS],
            options,
            note=f"Alpaca's requests arrive for {LASTING['alpaca'] * options.duration_s:g} s.",
        ),
        "tables": [
            *(_two_by_two(dataset, rates[dataset]) for dataset in STARTS),
            *(
                latencies(f"Latencies: {dataset}", pick(records, lengths=dataset), names, by="variant")
                for dataset in STARTS
            ),
        ],
        "tried": {", ".join(key): search.tried() for key, search in searches.items()},
        "records": records,
    }


def _two_by_two(dataset: str, rates: Mapping[str, float]) -> Result:
    """Return the largest rates by recipe and KV type; `fcfs` does not use the CPU tier."""
    first = rates[f"fcfs, {KV[0]}"]
    rows = []
    for name in ("fcfs", NEAR_TRUE.name):
        found = [rates.get(f"{name}, {kv}", first) for kv in KV]
        rows.append((name, *found, *(f"{rate / first:.2f}x" for rate in found)))
    columns = ("scheduling", *(f"{kv}, req/s" for kv in KV), *(f"{kv}, to fcfs" for kv in KV))
    return table(f"Largest rate with {FASTSERVE_BOUND}: opt-13b, {dataset}", columns, rows)


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.8)
    panels = figure.subplots(1, len(STARTS))
    for axes, one in zip(panels, result["tables"], strict=False):
        series = {kv: [row[1 + place] for row in one["rows"]] for place, kv in enumerate(KV)}
        bars(axes, [row[0] for row in one["rows"]], series, dict(zip(KV, style.COLORS, strict=False)))
        axes.set(title=one["title"].rpartition(", ")[2], ylabel="largest rate (req/s)")
    legend_of(figure, panels[0])
    return {"int8.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
