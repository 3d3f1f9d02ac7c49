"""EconoServe figure 9: mean normalized latency by rate.

OPT-13B on one A100 with 80 GB, Llama-33B on two and OPT-175B on eight, three traces, one seed. The largest rates are
read off the curves, at a mean normalized latency of 0.07 s per token and at an attainment of 0.9. Each step is charged
the mean CPU time of the variant's decisions. Figures 10 and 11 use the same runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import (
    DEFAULTS,
    ECONOSERVE,
    LATENCY,
    MACHINES,
    MULTIRES,
    SPLIT,
    TRACES,
    loaded,
    records_of,
    said,
    system,
    variants,
)
from papers.figures.panels import Panels
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, grid, run_plans
from papers.figures.variants import Variant

BOUND_S, ATTAINED = 0.07, 0.9
NAMES = ["orca", "fcfs", "sarathi", *MULTIRES[:1]]
VARIANTS: tuple[Variant, ...] = (*variants(*NAMES), SPLIT, ECONOSERVE, DEFAULTS)
LOADS = {"opt-13b": (0.5, 0.8, 1.0, 1.25), "llama-33b": (0.6, 0.9, 1.25), "opt-175b": (0.6, 0.9, 1.25)}
# What the picture of this figure and figures 10 and 11 read.
KEPT = (
    *("normalized_latency_s.mean", "jct_s.mean", "slo.jct_attained", "slo.goodput_rps", "kv.used_mean"),
    *(
        "kv.allocated_mean",
        "forward.mean",
        "forward.target",
        "forward.at_target",
        "batch_mean",
        "throughput_tps",
        "load",
    ),
)
# ORCA reserves the rest of the context for every request and reaches the bound much earlier than the others.
ORCA_SHARE = {"alpaca": 0.1, "sharegpt": 0.25, "bookcorpus": 0.3}
PANELS = Panels(list(MACHINES), list(TRACES), [variant.name for variant in VARIANTS], by="variant")
RATIOS = [(DEFAULTS.name, "fcfs"), *((ECONOSERVE.name, other) for other in (*NAMES, SPLIT.name))]


def measure(options: Options) -> Result:
    options = options.charging()
    plans = {}
    for model, machine in MACHINES.items():
        for name, trace in TRACES.items():
            for variant in VARIANTS:
                share = ORCA_SHARE[name] if variant.recipe == "orca" else 1.0
                loads = [share * load for load in options.some(LOADS[model])]
                plans[model, name, variant.name] = grid(loaded(system(variant, trace, machine), trace, loads, options))
    run_plans("figure09", list(plans.values()), options)
    records = records_of(plans, "model", "lengths", "variant")
    systems = [
        system(variant, trace, machine)
        for machine in MACHINES.values()
        for variant in VARIANTS
        for trace in TRACES.values()
    ]
    return {
        "settings": said(systems, options),
        "tables": [
            *(
                PANELS.read_off(records, bound, RATIOS)
                for bound in (f"normalized_latency_s.mean<={BOUND_S}", f"slo.jct_attained>={ATTAINED}")
            ),
            compared("Latencies", records, ("model", "lengths", "load", "variant"), LATENCY),
        ],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    return {"latency.png": PANELS.draw(result["records"], "normalized_latency_s.mean", BOUND_S, (0.015, 0.6))}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=KEPT, docs={"latency.png": "econoserve-latency.png"})
