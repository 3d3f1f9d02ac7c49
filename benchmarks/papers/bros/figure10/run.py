"""BROS figure 10: latency of real-time requests and throughput of best-effort requests by real-time rate.

OPT-13B on two A100s, OPT-30B on four, Llama-3-70B on eight, real-time lengths of ShareGPT and LMSYS, 128 best-effort
requests in flight, two plans in flight. `bros` also runs with steps whose times vary by 10 % around the modeled ones.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import (
    BATCHED,
    BLIND,
    COMPARED,
    DATASETS,
    KEPT,
    LATENCY,
    MACHINES,
    NOISY,
    PLANS_IN_FLIGHT,
    RATES,
    ROUND_ROBIN,
    TPOT_KEPT,
    TTFT_KEPT,
    Load,
    against_rate,
    changes,
    records_of,
    said,
    shipped,
    side_by_side,
    system,
    window,
)
from papers.figures.report import main, table
from papers.figures.runs import Options, Result, grid, pick, run_plans
from skipjoin.observe.record import Record

VARIANTS = shipped(*COMPARED, NOISY)
NAMES = [variant.name for variant in VARIANTS]


def measure(options: Options) -> Result:
    options = window(options)
    loads = {name: Load(name) for name in DATASETS}
    systems = {
        (model, variant.name): system(variant, model, depth=PLANS_IN_FLIGHT)
        for model in MACHINES
        for variant in VARIANTS
    }
    plans = {
        (model, name, variant.name): grid(
            load.cells(variant, systems[model, variant.name], options.some(RATES[model]), options, seeds=1)
        )
        for name, load in loads.items()
        for model in MACHINES
        for variant in VARIANTS
    }
    run_plans("figure10", list(plans.values()), options)
    records = records_of(plans, "model", "lengths", "variant")
    keys = ("lengths", "model", "rate_rps")
    return {
        "settings": said(list(systems.values()), list(loads.values()), options),
        "tables": [
            summary(records),
            side_by_side("Normalized latency of real-time requests (s/token)", records, keys, LATENCY),
            side_by_side("Throughput of best-effort requests (req/s)", records, keys, BATCHED),
        ],
        "records": records,
    }


def summary(records: Sequence[Record]) -> Result:
    """Return changes from class-blind `fcfs` and from `round-robin`, as means over rates."""
    rows = []
    for lengths in DATASETS:
        for model in [*MACHINES, "all"]:
            some = pick(records, lengths=lengths, **({} if model == "all" else {"model": model}))
            rows += [(lengths, model, name, *_changes(some, name)) for name in NAMES[1:]]
    columns = ("latency to class-blind", "best effort", "latency to round-robin", "best effort ")
    return table(
        "Against class-blind fcfs and round-robin, means over rates", ("lengths", "model", "variant", *columns), rows
    )


def _changes(records: Sequence[Record], name: str) -> list[str]:
    bases = (BLIND.name, ROUND_ROBIN.name)
    return [
        f"{100 * fmean(changes(records, name, field, base)):+.0f} %" for base in bases for field in (LATENCY, BATCHED)
    ]


def draw(result: Result) -> Mapping[str, Figure]:
    fields = {"latency (s/token)": LATENCY, "best effort (req/s)": BATCHED}
    return {f"{name}.png": against_rate(pick(result["records"], lengths=name), fields, NAMES) for name in DATASETS}


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        measure,
        draw,
        keeps=(*KEPT, LATENCY, BATCHED, TTFT_KEPT, TPOT_KEPT),
        docs={"sharegpt.png": "bros-latency.png"},
    )
