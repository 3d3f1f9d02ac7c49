"""How fast the simulator is: ShareGPT requests on OPT-13B on one A100-40GB under `fastserve`, on one core.

    python benchmarks/performance/simulator_speed/run.py [--repeats 3] [--out FILE]

`run`: 2,000 requests at 2.5 requests per second, wanted in at most 10 s. `growth`: microseconds per step with 1,000 to
16,000 requests at 2 per second, where the number of requests present stays the same: a step must not cost more because
more requests were seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import Cell, Extent, run
from skipjoin.workload.workload import synthetic

GROWTH = (1000, 4000, 16000)


def timed(cell: Cell) -> tuple[float, int]:
    """Seconds and steps of a run."""
    start = time.perf_counter()
    record = run(cell)
    return time.perf_counter() - start, record["steps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    (system,) = Machine(hardware="a100-40gb", model="opt-13b", kv_gib=11.0).systems("fastserve")
    workload = synthetic("sharegpt", "poisson")
    whole = [timed(Cell(system, workload, Extent(2.5, None, seed, 2000))) for seed in range(args.repeats)]
    seconds = sorted(second for second, _ in whole)
    record = {
        "machine": describe_machine(),
        "run": {"requests": 2000, "seconds": {"median": statistics.median(seconds), "all": seconds}},
        "growth": [],
    }
    print(record["run"], flush=True)
    growth: dict[int, list[float]] = {count: [] for count in GROWTH}
    for _ in range(args.repeats):
        for count in GROWTH:
            second, steps = timed(Cell(system, workload, Extent(2.0, None, 0, count)))
            growth[count].append(second / steps * 1e6)
    record["growth"] = [
        {"requests": count, "us_per_step": {"median": statistics.median(values), "all": values}}
        for count, values in growth.items()
    ]
    print(record["growth"])
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
