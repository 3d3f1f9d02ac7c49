"""ALISE figure 2, the panel of figure 6 with OPT-13B on ShareGPT: three seeds, and the paper's 30 minutes.

On a V100 with 32 GB. `fcfs` stands for vLLM. Requests arrive for 10 minutes at rates that rise until the mean
normalized latency breaks 0.2 s per token, at which the largest rates are read off the curves, and at the capacity also
for 30 minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.alise.setting import BOUND, KEPT, NEAR_TRUE, REGRESSED, V100
from papers.figures.panels import Panels
from papers.figures.report import latencies, main, settings_of
from papers.figures.runs import Options, Result, Rising, cells, grid, poisson, run_plans
from papers.figures.variants import lasting, named, plain

FORECASTS = (NEAR_TRUE, REGRESSED[1])
VARIANTS = (*plain("fcfs", "fastserve"), *FORECASTS)
MODEL, LENGTHS = "opt-13b", "sharegpt"
# Rates around the capacity, which is 0.89 req/s.
RATES, CAPACITY_RPS = (0.7, 0.9, 1.2), 0.9
# Durations in multiples of 300 s.
LASTING, PAPERS_LASTING = 2.0, 6.0
PANEL = Panels((MODEL,), (LENGTHS,), [variant.name for variant in VARIANTS], by="variant")


def measure(options: Options) -> Result:
    workload, extent = poisson(LENGTHS), lasting(options, LASTING)
    curves = {
        one.name: Rising(cells(one.on(V100[MODEL]), workload, options.some(RATES), extent), BOUND) for one in VARIANTS
    }
    longer = {
        one.name: grid(cells(one.on(V100[MODEL]), workload, [CAPACITY_RPS], lasting(options, PAPERS_LASTING)))
        for one in VARIANTS
    }
    run_plans("figure02", [*curves.values(), *longer.values()], options)
    records = named(curves)
    return {
        "settings": settings_of([one.on(V100[MODEL]) for one in VARIANTS], [workload], extent),
        "tables": [
            PANEL.read_off(records, BOUND, [(one.name, "fcfs") for one in FORECASTS]),
            latencies("Latencies of 10 minutes", records, PANEL.names, by="variant"),
            latencies("Latencies of 30 minutes", named(longer), PANEL.names, by="variant"),
        ],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    return {"latency.png": PANEL.draw(result["records"], "normalized_latency_s.mean", 0.2, (0.01, 10))}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, "normalized_latency_s.mean"))
