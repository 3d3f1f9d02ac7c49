"""EconoServe in overload: throughput, attainment, and the order within ranges."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import (
    ABLATIONS,
    DEFAULTS,
    SLO,
    TRACES,
    UTILIZATION,
    known,
    loaded,
    records_of,
    said,
    system,
)
from papers.figures.pictures import bars, curves, legend_of
from papers.figures.report import compared, main, table
from papers.figures.runs import Options, Result, grid, mean, pick, poisson, run_plans
from papers.figures.variants import Variant, plain
from skipjoin.observe.record import Record
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell, Extent

LOADS = (1.2, 2.0)
# Requests at once, and seconds of the run, in which not all can finish.
QUEUED = {"alpaca": (3000, 30.0), "sharegpt": (1000, 100.0), "bookcorpus": (300, 400.0)}
LONGEST = [
    Variant(f"{name}, longest first", name, "oracle", {"order": "longest"}) for name in ("econoserve-sdo", "econoserve")
]
VARIANTS = (
    *plain("fcfs", "sarathi", "fastserve"),
    *map(known, (*ABLATIONS, DEFAULTS)),
    *LONGEST,
)
OVERLOAD = {
    "attainment": "slo.jct_attained",
    "goodput req/s": "slo.goodput_rps",
    "JCT s": "jct_s.mean",
    "s/token": "normalized_latency_s.mean",
    **UTILIZATION,
    "hosted, share of requests": lambda record: record["kv"]["hosted_requests"] / record["requests"]["finished"],
}


def measure(options: Options) -> Result:
    systems = {(name, variant.name): system(variant, trace) for name, trace in TRACES.items() for variant in VARIANTS}
    at_once, over = {}, {}
    for (name, variant), of in systems.items():
        at_once[name, variant] = grid([Cell(of, poisson(name), Extent(1e5, None, 0, *QUEUED[name]), SLO)])
        over[name, variant] = grid(loaded(of, TRACES[name], options.some(LOADS), options))
    run_plans("saturated", [*at_once.values(), *over.values()], options)
    queued, records = (records_of(plans, "lengths", "variant") for plans in (at_once, over))
    return {
        "settings": said(list(systems.values()), options, note="Lengths are known."),
        "tables": [
            _throughput(queued, pick(records, load=LOADS[-1])),
            compared("Overload", records, ("lengths", "load", "variant"), OVERLOAD),
        ],
        "records": queued + records,
    }


def _throughput(queued: list[Record], over: list[Record]) -> Result:
    """Return tokens per second, and their ratio to those of `fcfs`."""
    rows = []
    for name in TRACES:
        first = [mean(pick(records, lengths=name, variant="fcfs"), "throughput_tps") for records in (queued, over)]
        for variant in VARIANTS:
            mine = [
                mean(pick(records, lengths=name, variant=variant.name), "throughput_tps") for records in (queued, over)
            ]
            ratios = [one / other for one, other in zip(mine, first, strict=True)]
            rows.append((name, variant.name, mine[0], ratios[0], mine[1], ratios[1]))
    columns = ("lengths", "variant", "all at once, tokens/s", "to fcfs", f"{LOADS[-1]:g} times, to the end", "to fcfs")
    return table("Saturated throughput", columns, rows)


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.8)
    left, right = figure.subplots(1, 2)
    rows = [row for row in result["tables"][0]["rows"] if not row[1].endswith("first")]
    names = list(dict.fromkeys(row[1] for row in rows))
    series = {name: [row[5] for row in rows if row[0] == name] for name in TRACES}
    bars(left, names, series, dict(zip(TRACES, style.COLORS, strict=False)))
    left.tick_params(axis="x", rotation=40, labelsize=7)
    left.set(ylabel="throughput to fcfs", ylim=(0, 1.3))
    left.legend(loc="upper center", ncols=len(TRACES), fontsize=6)
    records = [one for one in pick(result["records"], lengths="sharegpt") if one["load"] <= LOADS[-1]]
    curves(right, records, names, "slo.jct_attained", by="variant")
    right.set(xlabel="arrival rate (req/s)", ylabel="attainment, ShareGPT", ylim=(0, 1))
    legend_of(figure, right)
    return {"saturated.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("load", "slo.jct_attained"))
