"""Choices of the recipe `fastserve` where the paper is open, or where the recipe departs from it.

OPT-13B on one A100-40GB with 11 GiB of KV. Promotion: what a promotion is, after how long, and for which share of the
time (FastServe section 4.1), at the capacity and at an overload. Hysteresis: from which difference of estimated
scheduled times KV moves (section 4.2). Order: which request of a queue comes first. CPU memory: whether room for
swapped KV limits the rate.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.setting import BATCH_CAP, MACHINES, MAX_TOKENS, system
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Kept, Options, Result, cells, grid, mean, poisson, run_plans
from papers.figures.variants import lasting
from skipjoin.policies.mlfq import shortest_step
from skipjoin.policies.starvation import starvation_after
from skipjoin.sim.experiments.system import System

PACE = f"{Path(__file__).parent / 'pace.py'}:paced"
MACHINE = MACHINES["opt-13b"]
STEP_S = shortest_step(system("fcfs").cost)
# About the capacity, and the largest rate of `fastserve` in figure 11.
RATE_RPS, LARGEST_RPS = 2.9, 5.5
# Promotions that are compared at the overload that figure 11 found for `fastserve`, with its duration.
OVERLOAD_RPS = 5.55
OVERLOADED = {
    ("first-queue",): "fastserve[promotion=first-queue]",
    ("one-quantum",): "fastserve[promotion=one-quantum]",
    ("own-quantum",): "fastserve",
    ("none",): "fastserve[starvation_s=1e9]",
    ("fcfs",): "fcfs",
}
# Thresholds as multiples of the default, and shares of the time. Unpaced, short ones take hours to simulate.
THRESHOLDS, SHARES, UNPACED = (0.125, 1.0, 4.0), (0.05, 0.2), (1.0,)
HYSTERESES = (1, 8, 128)
# Lengths with 1.25 times the capacity of `fcfs` (figure 14), by increasing ratio of prompt to output.
ORDERED = {
    "alpaca": 75.0,
    "sharegpt": 3.62,
    "sharegpt*1,0.25": 19.0,
    "sharegpt*1,0.0625": 43.1,
    "sharegpt*1,0.03125": 51.8,
}
ORDERS = ("fastserve", "fastserve[order=shortest-prefill]", "fixed-priority")
CPU_GIB = (128.0, 4096.0)
FIELDS = {
    "s/token": "normalized_latency_s.mean",
    "JCT s": "jct_s.mean",
    "P99 JCT s": "jct_s.p99",
    "longest JCT s": "longest_jct_s",
}


def of_recipe(name: str, *, swap_gib: float = 128.0) -> System:
    machine = replace(MACHINE, swap_gib=swap_gib)
    (found,) = machine.systems(name, max_num_seqs=BATCH_CAP, max_tokens=MAX_TOKENS)
    return found


def promotions() -> dict[tuple[str, str, str], System]:
    """Return systems by promotion, multiple of the default threshold, and share of the time."""
    after_s = starvation_after(MACHINE.systems("fcfs")[0].cost)
    found = {}
    for how in ("first-queue", "one-quantum", "own-quantum"):
        for times in THRESHOLDS:
            threshold = f"promotion={how},starvation_s={times * after_s:.4g}"
            for share in SHARES:
                found[how, f"{times:g}", f"{share:g}"] = of_recipe(f"{PACE}[{threshold},share={share}]")
            if times in UNPACED:
                found[how, f"{times:g}", "unlimited"] = of_recipe(f"fastserve[{threshold},paced=false]")
    found["none", "", ""] = of_recipe("fastserve[starvation_s=1e9]")
    found["fcfs", "", ""] = system("fcfs")
    return found


def measure(options: Options) -> Result:
    workload, whole = poisson("sharegpt"), options
    overloaded = {
        name: grid(cells(of_recipe(recipe), workload, [OVERLOAD_RPS], whole)) for name, recipe in OVERLOADED.items()
    }
    # Half of the usual duration, because there are many cells, and less where hundreds of requests arrive.
    options = lasting(options, 0.5)
    short = lasting(options, 0.4)
    promoted = {name: grid(cells(of, workload, [RATE_RPS], options)) for name, of in promotions().items()}
    moved = {
        (f"{steps:g}",): grid(
            cells(of_recipe(f"fastserve[hysteresis_s={steps * STEP_S:.4g}]"), workload, [RATE_RPS], options)
        )
        for steps in HYSTERESES
    }
    ordered = {
        (lengths, f"{rate:g}", order): grid(
            cells(of_recipe(order) if "[" in order else system(order), poisson(lengths), [rate], short)
        )
        for lengths, rate in ORDERED.items()
        for order in ORDERS
    }
    memory = {
        (f"{gib:g}",): grid(cells(of_recipe("fastserve", swap_gib=gib), workload, [LARGEST_RPS], options))
        for gib in CPU_GIB
    }
    everything = [overloaded, promoted, moved, ordered, memory]
    run_plans("choices", [plan for plans in everything for plan in plans.values()], options)
    return {
        "settings": settings_of([system("fastserve")], [poisson(lengths) for lengths in ORDERED], options),
        "tables": [
            _table(f"Promotion, {RATE_RPS:g} req/s", ("promotion", "threshold", "share of time"), promoted),
            _table(f"Promotion, {OVERLOAD_RPS:g} req/s, {whole.duration_s:g} s", ("promotion",), overloaded),
            _table(f"Hysteresis, {RATE_RPS:g} req/s", ("shortest steps",), moved),
            _table(f"Order in a queue, {short.duration_s:g} s", ("lengths", "req/s", "order"), ordered),
            _table(f"CPU memory, {LARGEST_RPS:g} req/s", ("GiB",), memory),
        ],
    }


def _table(title: str, names: Sequence[str], plans: Mapping[tuple[str, ...], Kept]) -> Result:
    rows = [(*name, *(mean(plan.records, field) for field in FIELDS.values())) for name, plan in plans.items()]
    return table(title, (*names, *FIELDS), rows)


def draw(result: Result) -> Mapping[str, Figure]:
    return {}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
