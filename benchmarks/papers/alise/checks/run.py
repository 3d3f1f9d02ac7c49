"""Checks of the simulated forecasts: exact ones equal the oracle, and larger errors cost more.

    python benchmarks/papers/alise/checks/run.py [--quick]

OPT-13B on one A100 with 40 GB, 11 GiB of KV, ShareGPT at 4.5 requests per second for 120 s, two seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from dataclasses import replace

from matplotlib.figure import Figure

from papers.alise.setting import A100, alise
from papers.figures.pictures import bars
from papers.figures.report import latencies, main, settings_of, table
from papers.figures.runs import Options, Result, cells, grid, mean, pick, poisson, run_plans
from papers.figures.variants import lasting, named, plain
from skipjoin.report.plots import style

RATE_RPS, SEEDS, LASTING = 4.5, 2, 0.4
NOISES = tuple(alise(f"noise:{sigma:g}") for sigma in (0.0, 0.2, 0.4, 0.8, 1.6))
OTHERS = (alise("shuffled"), alise("constant:16"), alise("prior"))
VARIANTS = (*plain("alise-oracle"), *NOISES, *OTHERS, *plain("fastserve", "fcfs"))
# The prior with requests that ask for 2,048 tokens instead of the rest of the context.
ASKING = "alise prior, --max-tokens 2048"


def measure(options: Options) -> Result:
    extent, workload = lasting(options, LASTING), poisson("sharegpt")
    systems = {variant.name: variant.on(A100) for variant in VARIANTS}
    systems[ASKING] = replace(systems["alise prior"], max_tokens=2048)
    plans = {
        name: grid(cells(of, workload, [RATE_RPS], extent, seeds=options.seeds(SEEDS))) for name, of in systems.items()
    }
    run_plans("checks", list(plans.values()), options)
    records = named(plans)
    return {
        "settings": settings_of(list(systems.values()), [workload], extent, seeds=SEEDS),
        "tables": [
            _checks({name: mean(pick(records, variant=name), "normalized_latency_s.mean") for name in plans}),
            latencies("Latencies", records, list(plans), by="variant"),
        ],
        "records": records,
    }


def _checks(values: Mapping[str, float]) -> Result:
    """Return the checks of mean normalized latencies and their outcomes."""
    oracle, noises = values["alise-oracle"], [values[variant.name] for variant in NOISES]
    asking = values[ASKING] / values["alise prior"]
    worst = max((name for name in values if name.startswith("alise")), key=values.__getitem__)
    rows = [
        ("noise:0 to alise-oracle, within 2 %", noises[0] / oracle, abs(noises[0] / oracle - 1) <= 0.02),
        ("s/token grows with noise", noises[-1], noises == sorted(noises)),
        ("shuffled is the worst of alise", values["alise shuffled"], worst == "alise shuffled"),
        (
            "constant:16 to fcfs, below 0.5",
            values["alise constant:16"] / values["fcfs"],
            values["alise constant:16"] < 0.5 * values["fcfs"],
        ),
        ("--max-tokens 2048 to the default under prior, within 3 %", asking, abs(asking - 1) <= 0.03),
    ]
    return table(
        "Checks", ("check", "value", "holds"), [(name, value, "yes" if holds else "no") for name, value, holds in rows]
    )


def draw(result: Result) -> Mapping[str, Figure]:
    rows = result["tables"][1]["rows"]
    figure = style.new_figure(style.NARROW_IN, 3.0)
    axes = figure.add_subplot()
    bars(
        axes,
        [row[1].removeprefix("alise ").replace(", --max-tokens", ",\n") for row in rows],
        {"s/token": [row[2] for row in rows]},
        {"s/token": style.SKY},
    )
    axes.tick_params(axis="x", rotation=60, labelsize=6)
    axes.set(ylabel="s/token")
    return {"checks.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
