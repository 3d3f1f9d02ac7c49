"""BROS figure 3: head-of-line blocking, and a simple preemptive rule.

512 real-time requests of ShareGPT, OPT-13B on two A100s. The rule runs the requests that have waited longest since
their last step. 64 slots limit batches before memory does, 256 do not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import (
    BROS,
    FCFS,
    KEPT,
    LATENCY,
    MACHINES,
    SLO,
    TPOT_KEPT,
    TTFT_KEPT,
    Load,
    said,
    side_by_side,
    with_classes,
)
from papers.figures.pictures import curves, legend_of
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, pick, slim
from papers.figures.variants import plain
from skipjoin.observe.record import Record, rounded
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import Run
from skipjoin.sim.experiments.system import System

LONGEST_WAIT = "longest-wait"
SLOTS, RATES = (64, 256), (8.0, 12.0, 16.0, 24.0)
REQUESTS, SEEDS, ALONE = 512, 3, Load(in_flight=0)
COLUMNS = {
    "s/token": LATENCY,
    "queueing": "queueing",
    "TTFT s": "real_time.ttft_s.mean",
    "TTFT kept": TTFT_KEPT,
    "TPOT kept": TPOT_KEPT,
    "KV used": "kv.used_mean",
}


def systems(slots: int) -> dict[str, System]:
    fcfs, fastserve, bros = (one.on(MACHINES["opt-13b"], batch_cap=slots) for one in (FCFS, *plain("fastserve"), BROS))
    simple = replace(fcfs, recipe=f"{Path(__file__).with_name('longest_wait.py')}:{LONGEST_WAIT}")
    return {"fcfs": fcfs, LONGEST_WAIT: simple, "fastserve": fastserve, "bros": bros}


def measure(options: Options) -> Result:
    rates = options.some(RATES)
    options = replace(options, duration_s=REQUESTS / min(rates))
    compared_systems = {(slots, name): of for slots in SLOTS for name, of in systems(slots).items()}
    workload = ALONE.workload(blind=False)
    cells = {
        (*key, rate, seed): Cell(of, workload, Extent(rate, None, seed, REQUESTS), SLO)
        for key, of in compared_systems.items()
        for rate in rates
        for seed in options.seeds(SEEDS)
    }
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(simulated, cells.values())
        records = [
            {"slots": str(slots), "variant": name, **record}
            for (slots, name, *_), record in zip(cells, found, strict=True)
        ]
    known = [of for (_, name), of in compared_systems.items() if name != LONGEST_WAIT]
    settings = said(known, [ALONE], options, seeds=SEEDS)
    return {
        "settings": settings | {"note": f"{REQUESTS} requests, all real-time. Durations are those of the lowest rate."},
        "tables": [
            side_by_side("Normalized latency (s/token)", records, ("slots", "rate_rps"), LATENCY),
            side_by_side("Queueing, share of the completion time", records, ("slots", "rate_rps"), "queueing"),
            compared("Preemption by the longest wait", records, ("slots", "rate_rps", "variant"), COLUMNS),
        ],
        "records": records,
    }


def simulated(cell: Cell) -> Record:
    """Run a cell and return its record with the mean share of completion times that requests wait, as `queueing`."""
    run = Run(cell)
    shard = run.shard(0)
    shares = [one.waiting(shard.end_s) / one.jct(shard.end_s) for one in shard.facts]
    return with_classes(slim(run.record([shard]))) | {"queueing": rounded(fmean(shares))}


def draw(result: Result) -> Mapping[str, Figure]:
    fields = {"latency (s/token)": LATENCY, "queueing proportion": "queueing"}
    names = list(dict.fromkeys(record["variant"] for record in result["records"]))
    figure = style.new_figure(style.WIDE_IN, 2.6)
    panels = [(slots, *field) for field in fields.items() for slots in SLOTS]
    for axes, (slots, label, field) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        curves(axes, pick(result["records"], slots=str(slots)), names, field, by="variant")
        axes.set(title=f"{slots} slots", xlabel="arrival rate (req/s)", ylabel=label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    legend_of(figure, figure.axes[0])
    return {"preemption.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, LATENCY, TTFT_KEPT, TPOT_KEPT, "queueing"))
