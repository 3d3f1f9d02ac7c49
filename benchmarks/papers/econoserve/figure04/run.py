"""EconoServe figure 4: padding of forecasts.

OPT-13B on one A100 under `econoserve-sd` (the paper's SyncDecoupled) at the capacity of `fcfs`, forecasts with the
trace's noise, paddings from -50 % (half of the forecast is reserved) to 50 %.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import SYNCED, TRACES, loaded, said, system
from papers.econoserve.watch import watched
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result
from skipjoin.report.plots import style

LOAD, SEEDS = 1.0, 1
PADDINGS = (-0.5, -0.25, 0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
FIELDS = {
    "JCT s": "jct_s.mean",
    "waiting s": "breakdown_s.queueing",
    "execution s": "breakdown_s.execution",
    "KV used": "kv.used_mean",
    "KV allocated": "kv.allocated_mean",
    "outgrown": "watch.outgrown",
    "over": "watch.over",
    "under": "watch.under",
}


def measure(options: Options) -> Result:
    systems = {
        (name, padding): system(SYNCED, trace, padding=padding)
        for name, trace in TRACES.items()
        for padding in options.some(PADDINGS)
    }
    asked = [
        ({"lengths": name, "padding": padding}, cell)
        for (name, padding), of in systems.items()
        for cell in loaded(of, TRACES[name], [LOAD], options, seeds=SEEDS)
    ]
    records = watched(asked, options)
    return {
        "settings": said(list(systems.values()), options, seeds=SEEDS),
        "tables": [compared("By padding", records, ("lengths", "padding"), FIELDS)],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    shown = {"JCT to its least": "JCT s", "KV used": "KV used", "outgrown, share of requests": "outgrown"}
    columns, rows = result["tables"][0]["columns"], result["tables"][0]["rows"]
    figure = style.new_figure(style.WIDE_IN, 2.6)
    for axes, (label, field) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for number, name in enumerate(TRACES):
            mine = [row for row in rows if row[0] == name]
            values = [row[columns.index(field)] for row in mine]
            scale = min(values) if field == "JCT s" else 1.0
            look = style.look(number)
            heights = [value / scale for value in values]
            axes.plot([row[1] for row in mine], heights, color=look.color, marker=look.marker, label=name)
        axes.set(xlabel="padding", ylabel=label)
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"padding.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
