"""Compare `adaptive`, which schedules the calls of a program as one, with orders of calls, in the simulator.

    python benchmarks/arena/programs.py --jobs 2        # three seeds; continues where it stopped

Agents are those of `skipjoin.workload.agents`, by published statistics: 2 to 40 calls, pauses for tools, and prompts of
which 95 % are known from the call before. 60 programs on Qwen3-8B and an A100 of 40 GB, with and without a CPU tier.
The capacity is the rate at which the mean completion time under `fcfs`, without a CPU tier, is twice that of the same
programs under light load.

`per-call` is `adaptive` without programs. `--agents` names others, for which nothing was chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import harness
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.agents import Agents, Tail

HOME = Path(__file__).resolve().parent
OURS = "adaptive"
RECIPES = {
    "fcfs": "fcfs",
    "fastserve": "fastserve",
    "per-call": "adaptive[programs=off]",
    "hrrn": f"{HOME / 'rivals.py'}:hrrn",
    OURS: OURS,
}
LOADS = (0.8, 1.0, 1.2)
TIERS = {"no tier": 0.0, "tier": None}
# Programs per second under light load and at the start of the search, the ratio of completion times, and bisections.
LIGHT_RPS, START_RPS, KNEE, STEPS = 0.01, 0.16, 2.0, 4
AGENTS = {
    "agents": Agents(),
    "equal": Agents(calls=(14, 14)),
    "slow tools": Agents(slow_share=0.5),
    "short": Agents(calls=(1, 4), task=Tail(400, 0.8, 4096), template_tokens=1024),
    "long": Agents(calls=(1, 100)),
}
METRICS = ("mean", "p95", "call_s", "recomputed_tokens")


@dataclass(frozen=True)
class ProgramCell:
    agents: str
    tier: str
    load: float
    seed: int
    programs: int

    @property
    def name(self) -> str:
        return f"{self.agents}, {self.tier}, load {self.load:g}"


def simulate(cell: ProgramCell, recipe: str, rate: float) -> dict[str, float]:
    machine = Machine(model="qwen3-8b", hardware="a100-40gb", swap_gib=TIERS[cell.tier])
    (system,) = machine.systems(RECIPES[recipe], predictor="prior")
    record = run(Cell(system, AGENTS[cell.agents], Extent(rate, None, cell.seed, cell.programs)))
    programs = record["programs"]
    found = {name: programs["completion_s"][name] for name in ("mean", "p95")}
    return found | {
        "call_s": programs["call_s"],
        "recomputed_tokens": programs["recomputed_tokens"],
        "hit_rate": record["prefix"]["hit_rate"],
    }


def capacity(agents: str, programs: int) -> float:
    """Return the programs per second at which the mean completion time under `fcfs` is twice that of light load."""

    def mean(rate: float) -> float:
        return simulate(ProgramCell(agents, "no tier", 0.0, 0, programs), "fcfs", rate)["mean"]

    light, low, high = mean(LIGHT_RPS), LIGHT_RPS, START_RPS
    while mean(high) < KNEE * light:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if mean(middle) < KNEE * light else (low, middle)
    return round((low * high) ** 0.5, 4)


def cells(agents: Iterable[str], loads: Sequence[float], seeds: int, programs: int) -> Iterator[ProgramCell]:
    for name in agents:
        for tier in TIERS:
            for load in loads:
                yield from (ProgramCell(name, tier, load, seed, programs) for seed in range(seeds))


def summary(found: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> dict[str, dict[str, float]]:
    """Return ratios of means over seeds by cell: of completion times, and of recomputed tokens."""
    ratios = {}
    for name, recipes in found.items():
        if recipes.keys() != RECIPES.keys():
            continue
        mean = {recipe: fmean(one["mean"] for one in runs) for recipe, runs in recipes.items()}
        again = {recipe: fmean(one["recomputed_tokens"] for one in runs) for recipe, runs in recipes.items()}
        ratios[name] = {
            "fcfs_over_ours": round(mean["fcfs"] / mean[OURS], 3),
            "ours_over_best": round(mean[OURS] / min(mean[other] for other in mean if other != OURS), 3),
            "recomputed_to_fcfs": round(again[OURS] / max(1.0, again["fcfs"]), 3),
        }
    return ratios


class Record:
    def __init__(self, out: Path) -> None:
        self._out = out
        known = harness.read_record(out)
        self.capacities: dict[str, float] = dict(known.get("capacities", {}))
        self.cells: dict[str, dict[str, dict[str, Any]]] = dict(known.get("cells", {}))

    def has(self, cell: ProgramCell, recipe: str) -> bool:
        return str(cell.seed) in self.cells.get(cell.name, {}).get(recipe, {})

    def add(self, cell: ProgramCell, recipe: str, figures: Mapping[str, float]) -> None:
        runs = self.cells.setdefault(cell.name, {}).setdefault(recipe, {})
        runs[str(cell.seed)] = {name: float(f"{value:.5g}") for name, value in figures.items()}
        self.write()

    def summary(self) -> dict[str, dict[str, float]]:
        return summary(
            {name: {recipe: list(runs.values()) for recipe, runs in one.items()} for name, one in self.cells.items()}
        )

    def write(self) -> None:
        record = harness.new_record(summary=self.summary(), capacities=self.capacities, cells=self.cells)
        harness.write_record(record, self._out)


def main() -> None:
    parser = harness.parser(__doc__, jobs=2, seeds=3, programs=60)
    parser.add_argument("--agents", type=harness.some_of("agents", AGENTS), default=["agents"], help="default: agents")
    parser.add_argument("--loads", type=lambda text: list(map(float, harness.words(text))), default=LOADS)
    parser.add_argument("--match", default="", help="run only cells whose name contains this text")
    args = parser.parse_args()
    record = Record(args.out or HOME / "programs.json")
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        missing = {name: pool.submit(capacity, name, args.programs) for name in args.agents
                   if name not in record.capacities}  # fmt: skip
        record.capacities |= {name: one.result() for name, one in missing.items()}
        waiting: dict[Future[dict[str, float]], tuple[ProgramCell, str]] = {}
        for cell in cells(args.agents, args.loads, args.seeds, args.programs):
            for recipe in RECIPES if args.match in cell.name else ():
                if not record.has(cell, recipe):
                    rate = round(record.capacities[cell.agents] * cell.load, 4)
                    waiting[pool.submit(simulate, cell, recipe, rate)] = (cell, recipe)
        for done in as_completed(waiting):
            record.add(*waiting[done], done.result())
    record.write()
    for name, ratios in record.summary().items():
        harness.show(f"{name}: {', '.join(f'{what} {value}' for what, value in ratios.items())}\n")


if __name__ == "__main__":
    main()
