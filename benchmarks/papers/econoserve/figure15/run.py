"""EconoServe figure 15: scale of objectives, padding, reserve and buffer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import ECONOSERVE, SLO, TRACES, Trace, loaded, records_of, said, system
from papers.figures.report import compared, main
from papers.figures.runs import Kept, Options, Result, grid, mean, pick, run_plans
from skipjoin.observe.record import Slo
from skipjoin.report.plots import style

LOAD = 1.2
FACTORS = {
    "SLO scale": (0.5, 1.0, 1.5, 2.0, 2.5),
    "padding": (-0.5, -0.25, 0.0, 0.05, 0.1, 0.15, 0.2, 0.3),
    "reserve": (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1),
    "buffer": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3),
}
FIELDS = {
    "JCT s": "jct_s.mean",
    "req/s": "throughput_rps",
    "attainment": "slo.jct_attained",
    "KV used": "kv.used_mean",
    "pauses": "kv.preemptions.pause",
    "swaps": "kv.preemptions.swap",
    "drops": "kv.preemptions.drop",
}


def run_of(trace: Trace, factor: str, value: float, options: Options) -> Kept:
    params = {} if factor == "SLO scale" else {factor: value}
    slo = Slo(jct_scale=value) if factor == "SLO scale" else SLO
    return grid(loaded(system(ECONOSERVE, trace, **params), trace, [LOAD], options, slo=slo))


def measure(options: Options) -> Result:
    plans = {
        (factor, name, value): run_of(trace, factor, value, options)
        for factor, values in FACTORS.items()
        for name, trace in TRACES.items()
        for value in options.some(values)
    }
    run_plans("figure15", list(plans.values()), options)
    records = records_of(plans, "factor", "lengths", "value")
    return {
        "settings": said([system(ECONOSERVE, trace) for trace in TRACES.values()], options),
        "tables": [
            compared(f"By {factor}", pick(records, factor=factor), ("lengths", "value"), FIELDS) for factor in FACTORS
        ],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    shown = {"JCT": "jct_s.mean", "throughput": "throughput_rps", "attainment": "slo.jct_attained"}
    figure = style.new_figure(style.WIDE_IN, 6.4)
    panels = figure.subplots(len(FACTORS), len(TRACES), sharey=True)
    for factor, line in zip(FACTORS, panels, strict=True):
        for axes, name in zip(line, TRACES, strict=True):
            mine = pick(result["records"], factor=factor, lengths=name)
            values = list(dict.fromkeys(record["value"] for record in mine))
            found = {
                label: [mean(pick(mine, value=value), field) for value in values] for label, field in shown.items()
            }
            series = {label: [one / max(some) for one in some] for label, some in found.items()}
            for number, (label, heights) in enumerate(series.items()):
                look = style.look(number)
                axes.plot(values, heights, color=look.color, marker=look.marker, label=label)
            axes.set(xlabel=f"{factor}, {name}", ylim=(0, 1.05))
    figure.supylabel("to the largest", fontsize=9)
    style.legend(figure, *panels[0][0].get_legend_handles_labels())
    return {"factors.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("value", "jct_s.mean", "slo.jct_attained", "throughput_rps"))
