"""EconoServe figure 5: reservations that are too large or too small, and the cost of outgrowing one.

OPT-13B on one A100 at 1.2 times the capacity of `fcfs`, forecasts with the trace's noise. `econoserve-sd` runs with a
reserve for requests that outgrow their reservation, and without one, so that they pause. For comparison `fcfs` drops KV
and `fastserve-reactive` swaps it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import SYNCED, TRACES, loaded, said, system
from papers.econoserve.watch import watched
from papers.figures.pictures import bars
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, pick
from papers.figures.variants import Variant, plain
from skipjoin.options import Value
from skipjoin.report.plots import style

LOAD, SEEDS = 1.2, 1
FIELDS = {
    "over": "watch.over",
    "under": "watch.under",
    "outgrown": "watch.outgrown",
    "paused, share of JCT": "watch.preempted.pause",
    "swapped, share of JCT": "watch.preempted.swap",
    "dropped, share of JCT": "watch.preempted.drop",
    "JCT s": "jct_s.mean",
    "pauses": "kv.preemptions.pause",
    "swaps": "kv.preemptions.swap",
    "drops": "kv.preemptions.drop",
}


def variants() -> list[tuple[str, Variant, dict[str, Value]]]:
    """Return names, variants and parameters that replace the trace's."""
    econoserve = [(f"reserve {share:g}", SYNCED, {"reserve": share}) for share in (0.0, 0.02, 0.1)]
    others = [(variant.name, variant, {}) for variant in plain("fcfs", "fastserve-reactive")]
    return [("the trace's reserve", SYNCED, {}), *econoserve, *others]


def measure(options: Options) -> Result:
    systems = {
        (name, label): system(variant, trace, **params)
        for name, trace in TRACES.items()
        for label, variant, params in variants()
    }
    asked = [
        ({"lengths": name, "variant": label}, cell)
        for (name, label), of in systems.items()
        for cell in loaded(of, TRACES[name], [LOAD], options, seeds=SEEDS)
    ]
    records = watched(asked, options)
    return {
        "settings": said(list(systems.values()), options, seeds=SEEDS),
        "tables": [compared("Reservations and what outgrowing them costs", records, ("lengths", "variant"), FIELDS)],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.NARROW_IN, 2.8)
    axes = figure.add_subplot()
    series = {
        side: [
            100 * pick(result["records"], lengths=name, variant="the trace's reserve")[0]["watch"][side]
            for name in TRACES
        ]
        for side in ("over", "under")
    }
    bars(axes, list(TRACES), series, {"over": style.BLUE, "under": style.VERMILION})
    axes.set_ylabel("% of the reservation")
    style.legend(figure, *axes.get_legend_handles_labels())
    return {"reservations.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("watch.over", "watch.under"))
