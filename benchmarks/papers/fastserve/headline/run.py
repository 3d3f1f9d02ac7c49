"""FastServe's factor by baseline, precision of KV and duration.

OPT-13B on one A100-40GB with 11 GiB of KV and ShareGPT, as in figure 11. The factor is the ratio of the largest rates
with a mean normalized latency of at most 0.3 s per token, searched to 2 %. It depends on how much KV the baseline
reserves at admission (vLLM none, Orca the maximum), on whether KV has 8 bits, and on the duration, because every queue
grows above the capacity.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.setting import BATCH_CAP, MACHINES, MEAN_BOUND
from papers.figures.pictures import bars, legend_of
from papers.figures.report import main, ratio_of, settings_of, table
from papers.figures.runs import Options, Result, Search, cells, poisson, run_plans
from papers.recipes import SPELLED
from skipjoin.report.plots import style
from skipjoin.sim.experiments.system import System

# First come, first served by what it reserves at admission. Requests ask for 1,024 tokens, or for the context.
ON_DEMAND, RESERVED, WHOLE = "fcfs", "fcfs, prompt + 1,024 reserved", "fcfs, context reserved"
OURS, IN_8_BITS = "fastserve", "fastserve, int8 KV"
BASELINES = (ON_DEMAND, RESERVED, WHOLE)
SYSTEMS: dict[str, tuple[str, dict[str, Any], int | str]] = {
    ON_DEMAND: ("fcfs", {}, "exact"),
    RESERVED: ("orca", {}, 1024),
    WHOLE: ("orca", {}, "room"),
    OURS: ("fastserve", {}, "exact"),
    IN_8_BITS: ("fastserve", {"kv_cache_dtype": "int8"}, "exact"),
}
# Seconds of arrivals, seeds and systems. A search of twenty minutes takes ten times as long, so it has one seed.
BY_DURATION = (ON_DEMAND, OURS, IN_8_BITS)
DURATIONS: tuple[tuple[float, int, tuple[str, ...]], ...] = (
    (60.0, 3, BY_DURATION),
    (300.0, 3, tuple(SYSTEMS)),
    (1200.0, 1, (ON_DEMAND, OURS)),
)
# Duration whose rates are drawn for all systems.
DRAWN_S = 300.0
# First rates of the searches, in requests per second.
STARTS = {ON_DEMAND: 3.7, RESERVED: 1.5, WHOLE: 1.0, OURS: 5.8, IN_8_BITS: 9.5}
# How much the first rate falls from five minutes to twenty, and rises to one.
SCALES = {60.0: 1.6, 300.0: 1.0, 1200.0: 0.8}


def system(name: str) -> System:
    recipe, machine, asked = SYSTEMS[name]
    on = replace(MACHINES["opt-13b"], **machine)
    (found,) = on.systems(SPELLED[recipe], max_num_seqs=BATCH_CAP, max_tokens=asked)
    return found


def measure(options: Options) -> Result:
    searches = {}
    for duration_s, seeds, names in DURATIONS:
        lasting = replace(options, duration_s=options.lasting_s or duration_s)
        for name in names:
            start = STARTS[name] * SCALES[duration_s]
            found = cells(system(name), poisson("sharegpt"), [start], lasting, seeds=options.seeds(seeds))
            searches[duration_s, name] = Search(found, MEAN_BOUND)
    run_plans("headline", list(searches.values()), options)
    rows = []
    for (duration_s, name), search in searches.items():
        ratios = [
            ratio_of(search.rate, baseline.rate) if (baseline := searches.get((duration_s, other))) else "-"
            for other in BASELINES
        ]
        rows.append((f"{duration_s:g}", name, search.rate.rate_rps if search.rate else None, *ratios))
    seeds_of = ", ".join(f"{len(options.seeds(seeds))} of {duration_s:g} s" for duration_s, seeds, _ in DURATIONS)
    return {
        "settings": settings_of(
            [system(name) for name in SYSTEMS], [poisson("sharegpt")], options, note=f"Seeds: {seeds_of}."
        ),
        "tables": [table(f"Largest rate with {MEAN_BOUND}", ("s", "system", "req/s", *map(_to, BASELINES)), rows)],
        "tried": {f"{duration_s:g} s, {name}": search.tried() for (duration_s, name), search in searches.items()},
    }


def _to(baseline: str) -> str:
    return f"to {baseline}"


def draw(result: Result) -> Mapping[str, Figure]:
    rates = {(float(row[0]), row[1]): row[2] for row in result["tables"][0]["rows"]}
    colors = dict(zip(SYSTEMS, style.COLORS, strict=False))
    figure = style.new_figure(style.WIDE_IN, 3.0)
    by_system, by_duration = figure.subplots(1, 2)
    bars(by_system, [f"{DRAWN_S:g} s"], {name: [rates[DRAWN_S, name] or 0.0] for name in SYSTEMS}, colors)
    by_system.set_ylabel("req/s at 0.3 s per token")
    for name in (OURS, IN_8_BITS):
        found = {duration: rate / rates[duration, ON_DEMAND] for (duration, of), rate in rates.items() if of == name}
        by_duration.plot(found.keys(), found.values(), color=colors[name], marker="o")
    by_duration.set(xscale="log", ylim=(0, None), xlabel="seconds of arrivals", ylabel=f"times the rate of {ON_DEMAND}")
    legend_of(figure, by_system)
    return {"headline.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
