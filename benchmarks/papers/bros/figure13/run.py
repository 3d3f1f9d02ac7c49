"""BROS figure 13: effect of KV management.

OPT-30B on four A100s at 10 real-time requests per second, 128 best-effort requests in flight, for ten minutes, three
seeds. Without KV management, preempted requests are recomputed (`bros-recompute`, section 7.4.1). `bros-swap` moves all
KV of a request, and `bros-unshared` a part.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import (
    BROS,
    DATASETS,
    FIELDS,
    KEPT,
    PAPER_TIMES,
    PLANS_IN_FLIGHT,
    RECOMPUTE,
    SWAP,
    TPOT_KEPT,
    TTFT_KEPT,
    UNSHARED,
    Load,
    records_of,
    said,
    shipped,
    system,
    window,
)
from papers.figures.pictures import bars, look
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, grid, mean, pick, run_plans
from skipjoin.report.plots import style

MODEL, RATE, SEEDS = "opt-30b", 10.0, 3
VARIANTS = shipped(RECOMPUTE, SWAP, BROS, UNSHARED)
COLUMNS = {**FIELDS, "P99 TTFT s": "real_time.ttft_s.p99", "P99 TPOT s": "real_time.tpot_s.p99"}


def measure(options: Options) -> Result:
    options = window(options, PAPER_TIMES)
    systems = {variant.name: system(variant, MODEL, depth=PLANS_IN_FLIGHT) for variant in VARIANTS}
    loads = [Load(name) for name in DATASETS]
    plans = {
        (MODEL, load.dataset, variant.name): grid(
            load.cells(variant, systems[variant.name], [RATE], options, seeds=SEEDS)
        )
        for load in loads
        for variant in VARIANTS
    }
    run_plans("figure13", list(plans.values()), options)
    records = records_of(plans, "model", "lengths", "variant")
    return {
        "settings": said(list(systems.values()), loads, options, seeds=SEEDS),
        "tables": [compared(f"{MODEL} at {RATE:g} req/s", records, ("lengths", "variant"), COLUMNS)],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    fields = {"TTFT within 0.4 s": TTFT_KEPT, "TPOT within 0.2 s": TPOT_KEPT}
    names = [variant.name for variant in VARIANTS]
    figure = style.new_figure(style.NARROW_IN, 2.6)
    for axes, (label, field) in zip(figure.subplots(1, len(fields)), fields.items(), strict=True):
        series = {
            name: [mean(pick(result["records"], lengths=one, variant=name), field) for one in DATASETS]
            for name in names
        }
        bars(axes, list(DATASETS), series, {name: look(name).color for name in names})
        axes.set(ylim=(0, 1.1), title=label)
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"management.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, TTFT_KEPT, TPOT_KEPT))
