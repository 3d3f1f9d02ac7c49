"""Measure the speed of the simulator: ShareGPT requests to OPT-13B on one A100-40GB under `fastserve`, on one core.

    python benchmarks/performance/simulator_speed/run.py [--repeats 3] [--out FILE]

`run` is the time for 2,000 requests at 2.5 requests per second; the target is at most 10 s. `growth` is the
microseconds per step with 1,000 to 16,000 requests at 2 per second. The number of requests in the system stays the
same, so a step must not cost more after more requests.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.workload import synthetic

GROWTH = (1000, 4000, 16000)


def timed(cell: Cell) -> tuple[float, int]:
    """Return the seconds and the number of steps of a run."""
    start = time.perf_counter()
    record = run(cell)
    return time.perf_counter() - start, record["steps"]


def main() -> None:
    args = harness.parser(__doc__, repeats=3).parse_args()
    record = harness.new_record()
    (system,) = Machine(hardware="a100-40gb", model="opt-13b", kv_gib=11.0).systems("fastserve")
    workload = synthetic("sharegpt", "poisson")
    whole = [timed(Cell(system, workload, Extent(2.5, None, seed, 2000))) for seed in range(args.repeats)]
    seconds = sorted(second for second, _ in whole)
    record["run"] = {"requests": 2000, "seconds": {"median": statistics.median(seconds), "all": seconds}}
    harness.show(record["run"])
    growth: dict[int, list[float]] = {count: [] for count in GROWTH}
    for turn in range(args.repeats):
        for count in harness.in_turn(GROWTH, turn):
            second, steps = timed(Cell(system, workload, Extent(2.0, None, 0, count)))
            growth[count].append(second / steps * 1e6)
    record["growth"] = [
        {"requests": count, "us_per_step": {"median": statistics.median(values), "all": values}}
        for count, values in growth.items()
    ]
    harness.show(record["growth"])
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
