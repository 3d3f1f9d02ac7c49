"""EconoServe figure 14: decision time.

OPT-13B on one A100, three traces at 1.2 times the capacity of `fcfs`, and 3,000 requests of ShareGPT at once. Decision
times are CPU times on this machine, one run at a time; everything else is simulated. The loads are then repeated with
each step delayed by the variant's mean decision time, or by that of `--decision-ms`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import (
    ABLATIONS,
    BASELINES,
    LATENCY,
    SHAREGPT,
    SLO,
    SPLIT,
    TRACES,
    UTILIZATION,
    loaded,
    records_of,
    said,
    system,
)
from papers.figures.pictures import bars
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, charged, grid, pick, poisson, probing, run_plans
from skipjoin.observe.record import Record
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.system import System

LOAD, VARIANTS = 1.2, (*BASELINES, SPLIT, *ABLATIONS)
# Number of requests at once, and seconds of the run.
QUEUED, _WATCHED_S = 3000, 30.0


def share(record: Record) -> float:
    """Return the decision time relative to the simulated time of the run."""
    return float(record["decision_ms"]["mean"] * record["steps"] / 1000 / record["duration_s"])


FIELDS = {
    "ms": "decision_ms.mean",
    "P99 ms": "decision_ms.p99",
    "share of the run": share,
    "steps": "steps",
    "requests in a step": "batch_mean",
}


def measure(options: Options) -> Result:
    systems = {(name, variant.name): system(variant, trace) for name, trace in TRACES.items() for variant in VARIANTS}
    plans = {key: grid(loaded(probing(of), TRACES[key[0]], [LOAD], options)) for key, of in systems.items()}
    for variant in VARIANTS:
        cell = Cell(
            probing(system(variant, SHAREGPT)), poisson("sharegpt"), Extent(1e5, None, 0, QUEUED, _WATCHED_S), SLO
        )
        plans[f"sharegpt, {QUEUED} at once", variant.name] = grid([cell])
    run_plans("figure14", list(plans.values()), replace(options, jobs=1, decisions=None))
    records = records_of(plans, "case", "variant")
    with_costs = _charged(systems, records, options)
    return {
        "settings": said(list(systems.values()), options),
        "tables": [
            compared("Decision time", records, ("case", "variant"), FIELDS),
            compared("With decisions charged", with_costs, ("lengths", "variant", "decisions"), LATENCY | UTILIZATION),
        ],
        "records": records,
    }


def _charged(
    systems: Mapping[tuple[str, str], System], records: Sequence[Record], options: Options
) -> Sequence[Record]:
    measured = {
        (one["case"], one["variant"]): charged(systems[one["case"], one["variant"]], one)
        for one in records
        if one["case"] in TRACES
    }
    given = options.decisions
    plans = {
        (*key, name): grid(loaded(one, TRACES[key[0]], [LOAD], options))
        for key, of in systems.items()
        for name, one in (
            ("free", of),
            ("charged", replace(of, decision_s=given) if isinstance(given, float) else measured[key]),
        )
    }
    run_plans("figure14, charged", list(plans.values()), replace(options, decisions=None))
    return records_of(plans, "lengths", "variant", "decisions")


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.8)
    axes = figure.add_subplot()
    records = result["records"]
    names = list(dict.fromkeys(record["variant"] for record in records))
    cases = list(dict.fromkeys(record["case"] for record in records))
    series = {case: [one["decision_ms"]["mean"] for one in pick(records, case=case)] for case in cases}
    bars(axes, names, series, dict(zip(cases, style.COLORS, strict=False)))
    axes.set(ylabel="ms for a decision", yscale="log")
    for label in axes.get_xticklabels():
        label.set(rotation=30, ha="right")
    style.legend(figure, *axes.get_legend_handles_labels())
    return {"decisions.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("decision_ms.mean",))
