"""EconoServe figure 1: schedulers with known lengths.

OPT-13B on one A100, three traces, 1.2 times the capacity of `fcfs`: throughput, KV, forward size, requests that lost KV
for lack of blocks, the parts of the completion time, and requests that finish per step. Each step is charged the mean
CPU time of the variant's decisions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import (
    ABLATIONS,
    BASELINES,
    TRACES,
    UTILIZATION,
    decision_share,
    known,
    loaded,
    said,
    system,
)
from papers.econoserve.watch import watched
from papers.figures.pictures import bars
from papers.figures.report import compared, main, table
from papers.figures.runs import Options, Result, pick
from skipjoin.observe.record import Record
from skipjoin.report.plots import style

LOAD = 1.2
# In the paper's first measurement all lengths are known (section 2.1).
VARIANTS = tuple(map(known, (*BASELINES, *ABLATIONS)))
TIMES = {
    "JCT s": "jct_s.mean",
    "waiting s": "breakdown_s.queueing",
    "execution s": "breakdown_s.execution",
    "swapping s": "breakdown_s.swapping",
    "lost KV, share of requests": "watch.failed",
    "swapped": "kv.preemptions.swap",
    "dropped": "kv.preemptions.drop",
    "decision s": "settings.decision_s",
    "share of the time": decision_share,
}
# Maximum number of finished requests per step with a column.
_MAX_ENDS = 4


def measure(options: Options) -> Result:
    options = options.charging()
    asked = [
        ({"lengths": trace.lengths, "variant": variant.name}, cell)
        for trace in TRACES.values()
        for variant in VARIANTS
        for cell in loaded(system(variant, trace), trace, [LOAD], options)
    ]
    records = watched(asked, options)
    systems = [system(variant, trace) for trace in TRACES.values() for variant in VARIANTS]
    return {
        "settings": said(systems, options, note="Lengths are known."),
        "tables": [
            compared("Utilization", records, ("lengths", "variant"), UTILIZATION),
            compared("Time and lost KV", records, ("lengths", "variant"), TIMES),
            _ends(records),
        ],
        "records": records,
    }


def _ends(records: list[Record]) -> Result:
    """Return the shares of steps by the requests that finish in them (figure 1f)."""
    rows = []
    for record in records:
        ends = {int(number): steps for number, steps in record["watch"]["ends"].items()}
        total = sum(ends.values())
        more = sum(steps for number, steps in ends.items() if number >= _MAX_ENDS)
        shares = [ends.get(number, 0) / total for number in range(_MAX_ENDS)]
        rows.append((record["lengths"], record["variant"], *shares, more / total))
    columns = (*map(str, range(_MAX_ENDS)), f"{_MAX_ENDS} or more")
    return table("Steps by the requests that they end, shares", ("lengths", "variant", *columns), rows)


def draw(result: Result) -> Mapping[str, Figure]:
    shown = {
        "throughput (tokens/s)": "throughput_tps",
        "KV used": "used_mean",
        "KV allocated": "allocated_mean",
        "completion time (s)": "jct_s",
    }
    names = [variant.name for variant in VARIANTS]
    figure = style.new_figure(style.WIDE_IN, 6.0)
    for axes, (label, field) in zip(figure.subplots(4, 1, sharex=True), shown.items(), strict=True):
        series = {name: [_height(one, field) for one in pick(result["records"], lengths=name)] for name in TRACES}
        bars(axes, names, series, dict(zip(TRACES, style.COLORS, strict=False)))
        axes.set_ylabel(label)
        if field in ("throughput_tps", "jct_s"):
            axes.set_yscale("log")
    for label in axes.get_xticklabels():
        label.set(rotation=30, ha="right")
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"schedulers.png": figure}


def _height(record: Record, field: str) -> float:
    value = record["kv"].get(field, record.get(field))
    return float(value["mean"] if isinstance(value, dict) else value)


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("throughput_tps", "jct_s.mean", "kv.used_mean", "kv.allocated_mean"))
