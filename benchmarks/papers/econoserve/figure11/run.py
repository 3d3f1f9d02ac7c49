"""EconoServe figure 11: use of KV and of the GPU in the runs of figure 9."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import MACHINES, of_figure09
from papers.figures.pictures import curves, legend_of
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, pick
from skipjoin.observe.record import Record
from skipjoin.report.plots import style


def filled(record: Record) -> float:
    """Return the mean forward size relative to the target."""
    return float(record["forward"]["mean"] / record["forward"]["target"])


FIELDS = {
    "KV used": "kv.used_mean",
    "KV allocated": "kv.allocated_mean",
    "forward to target": filled,
    "steps at 0.9 of target": "forward.at_target",
    "batch": "batch_mean",
    "tokens/s": "throughput_tps",
}


def measure(options: Options) -> Result:
    settings, records = of_figure09(options, "kv", "forward", "batch_mean", "throughput_tps")
    return {
        "settings": settings,
        "tables": [compared("By load", records, ("model", "lengths", "load", "variant"), FIELDS)],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    records = [{**record, "filled": filled(record)} for record in pick(result["records"], lengths="sharegpt")]
    names = list(dict.fromkeys(record["variant"] for record in records))
    shown = {"kv.used_mean": "KV used", "kv.allocated_mean": "KV allocated", "filled": "forward to target"}
    figure = style.new_figure(style.WIDE_IN, 5.4)
    panels = figure.subplots(len(shown), len(MACHINES), sharey="row")
    for (field, label), line in zip(shown.items(), panels, strict=True):
        for axes, model in zip(line, MACHINES, strict=True):
            curves(axes, pick(records, model=model), names, field, by="variant")
            axes.set(title=model if line is panels[0] else None, ylim=(0, None), xlim=(0, None))
        line[0].set_ylabel(label)
    for axes in panels[-1]:
        axes.set_xlabel("arrival rate (req/s)")
    legend_of(figure, panels[0][0])
    return {"utilization.png": figure}


if __name__ == "__main__":
    main(
        __file__, __doc__, measure, draw, keeps=("kv.used_mean", "kv.allocated_mean", "forward.mean", "forward.target")
    )
