"""FastServe figures 11 and 15 with two plans in flight, as a server runs on a GPU by default.

    python benchmarks/papers/fastserve/depth/run.py [--quick]

OPT-13B on ShareGPT as in those figures, which have one plan in flight. The next step is planned while one runs, so
decisions take no time of the device, but a preemption takes effect one step later.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.setting import system
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Options, Result, cells, grid, mean, poisson, run_plans
from skipjoin.observe.record import preempted
from skipjoin.sim.experiments.system import System

# The largest rates in figure 11.
LARGEST = {"fcfs": 3.51, "fastserve": 5.55}
MODES = ("fastserve", "fastserve-reactive", "fastserve-recompute", "fastserve-defer")
DEPTHS, RATE_RPS = (1, 2), 2.6
FIELDS = ("jct_s.mean", "normalized_latency_s.mean", "breakdown_s.swapping")


def at_depth(recipe: str, depth: int) -> System:
    """Return a recipe, by its label, with that many plans in flight."""
    return replace(system(recipe), pipeline_depth=depth)


def measure(options: Options) -> Result:
    workload = poisson("sharegpt")
    largest = {
        (depth, recipe): grid(cells(at_depth(recipe, depth), workload, [rate], options))
        for depth in DEPTHS
        for recipe, rate in LARGEST.items()
    }
    modes = {
        (depth, recipe): grid(cells(at_depth(recipe, depth), workload, [RATE_RPS], options))
        for depth in DEPTHS
        for recipe in MODES
    }
    run_plans("depth", [*largest.values(), *modes.values()], options)
    rows = []
    for (depth, recipe), plan in modes.items():
        first = modes[depth, MODES[0]].records
        ratios = [mean(plan.records, field) / mean(first, field) for field in FIELDS[:2]]
        share = 100 * mean(plan.records, FIELDS[2]) / mean(plan.records, FIELDS[0])
        evicted = sum(map(preempted, plan.records)) / len(plan.records)
        rows.append((depth, recipe, mean(plan.records, FIELDS[0]), *ratios, share, evicted))
    columns = ("depth", "recipe", "latency s", "to fastserve", "s/token to fastserve", "swapping %", "preemptions")
    return {
        "settings": settings_of([at_depth(recipe, 2) for recipe in ("fcfs", *MODES)], [workload], options),
        "tables": [
            table(
                "Mean latency at the largest rates with one plan in flight (figure 11)",
                ("depth", "recipe", "req/s", "s/token"),
                [
                    (depth, recipe, LARGEST[recipe], mean(plan.records, FIELDS[1]))
                    for (depth, recipe), plan in largest.items()
                ],
            ),
            table(f"KV management at {RATE_RPS:g} req/s (figure 15)", columns, rows),
        ],
    }


def draw(result: Result) -> Mapping[str, Figure]:
    """Return no pictures: tables show it all."""
    return {}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
