"""BROS figure 14: decision time.

OPT-13B on two A100s and OPT-30B on four, ShareGPT, 128 best-effort requests in flight. Decision times are CPU
times on one core of this machine, one run at a time, the faster of two seeds; everything else is simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import KEPT, SHAREGPT, VARIANTS, records_of, said, system, window
from papers.figures.pictures import bars, look
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, grid, mean, pick, run_plans
from skipjoin.observe.record import Record
from skipjoin.report.plots import style

# The fastest seed counts, because the machine is shared.
MODELS, RATES, SEEDS = ("opt-13b", "opt-30b"), (8.0, 12.0), 2


def share(record: Record) -> float:
    """Return the decision time relative to a step and its decision."""
    decision_s = record["decision_ms"]["mean"] / 1000
    return float(decision_s / (decision_s + record["duration_s"] / record["steps"]))


COLUMNS = {
    "ms": "decision_ms.mean",
    "P99 ms": "decision_ms.p99",
    "ms of a step": lambda record: 1000 * record["duration_s"] / record["steps"],
    "share": share,
    "requests in a step": "batch_mean",
}


def measure(options: Options) -> Result:
    options = window(options)
    systems = {(model, variant.name): system(variant, model) for model in MODELS for variant in VARIANTS}
    plans = {
        (model, "sharegpt", variant.name): grid(
            SHAREGPT.cells(variant, systems[model, variant.name], options.some(RATES), options, seeds=SEEDS)
        )
        for model in MODELS
        for variant in VARIANTS
    }
    run_plans("figure14", list(plans.values()), replace(options, jobs=1))
    records = records_of(plans, "model", "lengths", "variant")
    return {
        "settings": said(list(systems.values()), [SHAREGPT], options, seeds=SEEDS),
        "tables": [compared("Decision time", fastest(records), ("model", "rate_rps", "variant"), COLUMNS)],
        "records": records,
    }


def fastest(records: Sequence[Record]) -> list[Record]:
    """Return the run with the shortest decisions of each variant at each rate."""
    found: dict[tuple[object, ...], Record] = {}
    for record in sorted(records, key=lambda record: record["decision_ms"]["mean"], reverse=True):
        found[record["model"], record["variant"], record["workload"]["rate_rps"]] = record
    return [record for record in records if any(record is one for one in found.values())]


def draw(result: Result) -> Mapping[str, Figure]:
    rates = sorted({record["workload"]["rate_rps"] for record in result["records"]})
    names = [variant.name for variant in VARIANTS]
    figure = style.new_figure(style.WIDE_IN, 2.6)
    for axes, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS, strict=True):
        some = pick(fastest(result["records"]), model=model)
        series = {
            name: [mean(pick(some, variant=name, rate_rps=rate), "decision_ms.mean") for rate in rates]
            for name in names
        }
        bars(axes, [f"{rate:g} req/s" for rate in rates], series, {name: look(name).color for name in names})
        axes.set_title(model)
    figure.axes[0].set_ylabel("ms for a decision")
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"decisions.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, "decision_ms.mean"))
