"""FastServe figure 15: KV management under memory pressure, and the parts of the latency.

OPT-13B on ShareGPT under skip-join MLFQ. KV is swapped proactively (`fastserve`), swapped when blocks run out
(`fastserve-reactive`), dropped and recomputed (`fastserve-recompute`), or new requests are deferred
(`fastserve-defer`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.setting import system
from papers.figures.pictures import curves, legend_of
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Options, Result, cells, grid, mean, pick, poisson, run_plans
from skipjoin.observe.record import preempted
from skipjoin.report.plots import style

RECIPES = ("fastserve", "fastserve-reactive", "fastserve-recompute", "fastserve-defer")
# Higher rates take minutes to simulate, because reactive swapping evicts and restores in every step. At the reported
# rate memory is short and arithmetic is not.
RATES, REPORTED_RPS = (1.6, 2.0, 2.3, 2.6, 2.9, 3.2), 2.6
PARTS = {"queueing": style.SKY, "execution": style.GREEN, "swapping": style.VERMILION}


def measure(options: Options) -> Result:
    rates = [rate for rate in RATES if rate in options.some(RATES) or rate == REPORTED_RPS]
    workload = poisson("sharegpt")
    plans = {recipe: grid(cells(system(recipe), workload, rates, options)) for recipe in RECIPES}
    run_plans("figure15", list(plans.values()), options)
    records = [record for plan in plans.values() for record in plan.records]
    return {
        "settings": settings_of([system(recipe) for recipe in RECIPES], [workload], options),
        "tables": [_ratios(records, rates), _breakdown(records, rates)],
        "records": records,
    }


def _ratios(records: list[Result], rates: list[float]) -> Result:
    rows = []
    for rate in rates:
        first = pick(records, recipe="fastserve", rate_rps=rate)
        for recipe in RECIPES:
            mine = pick(records, recipe=recipe, rate_rps=rate)
            values = [
                value
                for field in ("jct_s.mean", "normalized_latency_s.mean")
                for value in (mean(mine, field), mean(mine, field) / mean(first, field))
            ]
            rows.append((rate, recipe, *values, fmean(map(preempted, mine)), mean(mine, "kv.recomputed_tokens")))
    columns = (
        "req/s",
        "recipe",
        "latency s",
        "to fastserve",
        "s/token",
        "to fastserve",
        "preemptions",
        "recomputed tokens",
    )
    return table("Mean latency by the way to treat KV (paper: recompute 2.7x, reactive 1.7x)", columns, rows)


def _breakdown(records: list[Result], rates: list[float]) -> Result:
    rows = []
    for rate in rates:
        mine = pick(records, recipe="fastserve", rate_rps=rate)
        parts = [mean(mine, f"breakdown_s.{part}") for part in PARTS]
        total = mean(mine, "jct_s.mean")
        rows.append((rate, *parts, total, 100 * parts[-1] / total))
    columns = ("req/s", *(f"{part} s" for part in PARTS), "latency s", "swapping %")
    return table("Where the time goes under fastserve (paper: swapping below 5 %)", columns, rows)


def draw(result: Result) -> Mapping[str, Figure]:
    modes = style.new_figure(style.WIDE_IN, 3.2)
    panels = modes.subplots(1, 2)
    for axes, field in zip(panels, ("jct_s.mean", "normalized_latency_s.mean"), strict=True):
        curves(axes, result["records"], RECIPES, field)
        axes.set(xlabel="arrival rate (req/s)", ylabel=style.field_label(field), ylim=(0, None))
    legend_of(modes, panels[0])
    parts = style.new_figure(style.NARROW_IN, 3.0)
    axes = parts.add_subplot()
    rows = result["tables"][1]["rows"]
    ends = [0.0] * len(rows)
    for place, (part, color) in enumerate(PARTS.items(), start=1):
        heights = [row[place] for row in rows]
        axes.bar(
            [f"{row[0]:g}" for row in rows], heights, bottom=ends, color=color, edgecolor="black", lw=0.5, label=part
        )
        ends = [end + height for end, height in zip(ends, heights, strict=True)]
    axes.set(xlabel="arrival rate (req/s)", ylabel="time per request (s)")
    axes.grid(visible=False, axis="x")
    legend_of(parts, axes)
    return {"kv-modes.png": modes, "breakdown.png": parts}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("jct_s.mean", "normalized_latency_s.mean"))
