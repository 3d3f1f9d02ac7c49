"""Effect of the number of best-effort requests in flight, which the paper does not name, and of the batch size."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import (
    BATCHED,
    BLIND,
    BROS,
    FIELDS,
    KEPT,
    LATENCY,
    SHAREGPT,
    VARIANTS,
    Load,
    records_of,
    said,
    system,
    window,
)
from papers.figures.pictures import legend_of, look
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, grid, mean, pick, run_plans
from skipjoin.report.plots import style
from skipjoin.sim.experiments.system import System
from skipjoin.workload.streams import ClosedMode

RATE, SEEDS = 8.0, 2
LOADS = {str(size): Load(in_flight=size) for size in (32, 128, 512)}
LOADS["128, refilled"] = Load(in_flight=128, mode=ClosedMode.REFILL)
# Maximum number of requests in a step; 128 limit both classes, as in the paper.
SLOTS = (128, 256, 512)
SMALL, LARGE, LARGE_RATES = "opt-13b", "llama-3-70b", (8.0, 15.0)


def measure(options: Options) -> Result:
    options = window(options)
    systems = {variant.name: system(variant) for variant in VARIANTS}
    plans = {
        (SMALL, name, variant.name): grid(load.cells(variant, systems[variant.name], [RATE], options, seeds=SEEDS))
        for name, load in LOADS.items()
        for variant in VARIANTS
    }
    large = {(LARGE, "128", BLIND.name): (BLIND, system(BLIND, LARGE))}
    large |= {(LARGE, "128", f"bros, {slots} slots"): (BROS, _with_slots(slots)) for slots in SLOTS}
    plans |= {
        key: grid(SHAREGPT.cells(variant, of, LARGE_RATES, options, seeds=1)) for key, (variant, of) in large.items()
    }
    run_plans("batch_size", list(plans.values()), options)
    records = records_of(plans, "model", "in_flight", "variant")
    return {
        "settings": said(
            [*systems.values(), *(of for _, of in large.values())], list(LOADS.values()), options, seeds=SEEDS
        ),
        "tables": [
            compared(f"{SMALL} at {RATE:g} req/s", pick(records, model=SMALL), ("in_flight", "variant"), FIELDS),
            compared(LARGE, pick(records, model=LARGE), ("rate_rps", "variant"), FIELDS),
        ],
        "records": records,
    }


def _with_slots(slots: int) -> System:
    return replace(system(BROS, LARGE), max_num_seqs=slots)


def draw(result: Result) -> Mapping[str, Figure]:
    fields = {"latency (s/token)": LATENCY, "best effort (req/s)": BATCHED}
    names = [variant.name for variant in VARIANTS]
    records = pick(result["records"], model=SMALL)
    figure = style.new_figure(style.WIDE_IN, 2.8)
    for axes, (label, field) in zip(figure.subplots(1, len(fields)), fields.items(), strict=True):
        for name in names:
            values = [mean(pick(records, in_flight=one, variant=name), field) for one in LOADS]
            shape = look(name)
            axes.plot(list(LOADS), values, color=shape.color, marker=shape.marker, linestyle=shape.dash, label=name)
        axes.set(title=label, xlabel="best-effort requests in flight", ylim=(0, None))
    legend_of(figure, figure.axes[0])
    return {"in_flight.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, LATENCY, BATCHED))
