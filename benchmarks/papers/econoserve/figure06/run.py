"""EconoServe figure 6: KV of waiting requests.

OPT-13B on one A100 at 1.2 times the capacity of `fcfs`, forecasts with the trace's noise. Every sixteenth plan samples
each waiting request that holds KV: chunked prompts, new generations and preempted generations, as shares of the pool.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import ECONOSERVE, SYNCED, TRACES, loaded, said, system
from papers.econoserve.watch import CHUNKED, NEW, PREEMPTED, watched
from papers.figures.report import main, table
from papers.figures.runs import Options, Result, pick
from skipjoin.report.plots import style

LOAD = 1.2
VARIANTS = (SYNCED, ECONOSERVE)
POINTS = ("mean", "p5", "p50", "p95")


def measure(options: Options) -> Result:
    systems = {(name, variant.name): system(variant, trace) for name, trace in TRACES.items() for variant in VARIANTS}
    asked = [
        ({"lengths": name, "variant": variant}, cell)
        for (name, variant), of in systems.items()
        for cell in loaded(of, TRACES[name], [LOAD], options)
    ]
    records = watched(asked, options)
    rows = [
        (record["lengths"], record["variant"], kind, held["seen"], *(_percent(held[point]) for point in POINTS))
        for record in records
        for kind, held in record["watch"]["held"].items()
    ]
    return {
        "settings": said(list(systems.values()), options),
        "tables": [
            table("KV of a waiting request, % of the pool", ("lengths", "variant", "kind", "seen", *POINTS), rows)
        ],
        "records": records,
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.NARROW_IN, 2.8)
    axes = figure.add_subplot()
    kinds = (NEW, PREEMPTED, CHUNKED)
    for number, kind in enumerate(kinds):
        for place, name in enumerate(TRACES):
            held = pick(result["records"], lengths=name, variant=SYNCED.name)[0]["watch"]["held"][kind]
            if held["seen"]:
                at = place + (number - 1) * 0.25
                below, above = ([100 * abs(held[end] - held["mean"])] for end in ("p5", "p95"))
                label = kind if place == 0 else None
                axes.bar(at, 100 * held["mean"], 0.22, yerr=[below, above], color=style.COLORS[number], label=label)
    axes.set_xticks(range(len(TRACES)), list(TRACES))
    axes.set_ylabel("KV, % of the pool")
    style.legend(figure, *axes.get_legend_handles_labels())
    return {"held.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("watch.held",))
