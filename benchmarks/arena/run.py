"""Compare `adaptive` with the best of the other recipes in hindsight, cell by cell, in the simulator.

The grid covers lengths, loads of 0.7 to 2 times the capacity, slots, KV pools, models, bursts, service classes,
objectives and forecasts, with 400 s of arrivals. The rivals run in every third cell. `--out` (by default `result.json`
next to this file, or `final.json` with `--final`) is written after each cell, and cells that it has are not run again:
an interrupted run continues. `--final` runs the seeds and lengths that were held out from tuning. `--quick` runs six
short cells and writes nothing by default. Results do not depend on the machine's load.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import harness
from arena.figures import (
    CORE,
    PAPERS,
    QUICK_RECIPES,
    RIVALS,
    SHORTEST_PREFILL,
    cell_line,
    figures_of,
    oracle_gap,
    summary,
    table,
    with_rivals,
)
from arena.grid import ArenaCell, full, quick
from arena.picture import draw
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run

HOME = Path(__file__).resolve().parent
_RIVALS_FILE = HOME / "rivals.py"
# Rivals run in one of this many cells.
_RIVALS_EVERY = 3
# Seconds of a saturated run that measures a capacity.
_SATURATED_S = 100.0


def spelled(recipe: str) -> str:
    """Return what `--recipe` accepts for a name in the arena."""
    return f"{_RIVALS_FILE}:{recipe}" if recipe in (*RIVALS, SHORTEST_PREFILL) else recipe


def capacity(cell: ArenaCell) -> float:
    """Return the capacity of `fcfs` in requests per second: tokens per second in saturation over the mean output."""
    workload = cell.workload()
    jobs = workload.draw(1.0, None, 0, 2000)
    mean = sum(job.output_tokens for job in jobs) / len(jobs)
    limit = max(100, round(cell.max_tps * _SATURATED_S / mean))
    saturated = Cell(cell.system_of("fcfs"), workload, Extent(1e5, None, 0, limit, _SATURATED_S))
    return float(run(saturated)["throughput_tps"]) / mean


def simulate(cell: ArenaCell, recipe: str, rate: float) -> dict[str, float]:
    extent = Extent(rate, cell.duration_s, cell.seed)
    return figures_of(run(Cell(cell.system_of(spelled(recipe)), cell.workload(), extent, slo_scale=cell.slo_scale)))


class Arena:
    def __init__(self, out: Path | None, jobs: int) -> None:
        self._out = out
        self._jobs = jobs
        known = harness.read_record(out)
        self.cells: dict[str, dict[str, Any]] = dict(known.get("cells", {}))
        self.capacities: dict[str, float] = dict(known.get("capacities", {}))

    def run(self, cells: Iterable[ArenaCell], recipes: Iterable[str]) -> None:
        recipes, cells = tuple(recipes), list(cells)
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn")) as pool:
            for some in _batches(cells, self._jobs):
                self._measure_capacities(pool, some)
                waiting: dict[Future[dict[str, float]], tuple[ArenaCell, str]] = {}
                for cell in some:
                    known = self.cells.get(cell.name, {}).get("recipes", {})
                    rate = round(self.capacities[cell.saturated().name] * cell.load, 4)
                    for recipe in (one for one in recipes if one not in known):
                        waiting[pool.submit(simulate, cell, recipe, rate)] = (cell, recipe)
                for done in as_completed(waiting):
                    cell, recipe = waiting[done]
                    self._add(cell, recipe, done.result())
                for cell in dict.fromkeys(cell for cell, _ in waiting.values()):
                    harness.show(cell_line(cell.name, self.cells[cell.name]["recipes"]))
                if waiting:
                    self.write()

    def _measure_capacities(self, pool: ProcessPoolExecutor, cells: Iterable[ArenaCell]) -> None:
        wanted = {cell.saturated().name: cell.saturated() for cell in cells}
        missing = {name: pool.submit(capacity, one) for name, one in wanted.items() if name not in self.capacities}
        self.capacities |= {name: round(one.result(), 4) for name, one in missing.items()}

    def _add(self, cell: ArenaCell, recipe: str, figures: Mapping[str, float]) -> None:
        kept = self.cells.setdefault(
            cell.name,
            {"lengths": cell.lengths, "system": cell.system, "load": cell.load, "predictor": cell.predictor,
             "seed": cell.seed, "recipes": {}},
        )  # fmt: skip
        kept["recipes"][recipe] = {name: float(f"{value:.5g}") for name, value in figures.items()}

    def write(self) -> None:
        record = harness.new_record(
            summary=summary(self.cells),
            summary_with_rivals=summary(with_rivals(self.cells), (*PAPERS, *RIVALS)),
            oracle_gap=oracle_gap(self.cells),
            capacities=self.capacities,
            cells=self.cells,
        )
        harness.write_record(record, self._out)


def _batches(cells: list[ArenaCell], size: int) -> Iterator[list[ArenaCell]]:
    """Yield as many cells at a time as there are processes, so that an interrupted run loses little."""
    for start in range(0, len(cells), size):
        yield cells[start : start + size]


def main() -> None:
    parser = harness.parser(__doc__, jobs=2, cells=0)
    parser.add_argument("--quick", action="store_true", help="run six short cells")
    parser.add_argument("--final", action="store_true", help="run the held-out seeds and lengths")
    parser.add_argument("--seconds", type=float, help="shorten the arrivals of cells, and write nothing by default")
    parser.add_argument("--match", default="", help="run only cells whose name contains this text")
    parser.add_argument("--recipes", type=harness.some_of("recipes", (*CORE, *RIVALS)), help="default: all")
    parser.add_argument("--draw", action="store_true", help="only draw and print the existing record")
    args = parser.parse_args()
    is_short = args.quick or args.seconds is not None
    out = args.out or (None if is_short else HOME / ("final.json" if args.final else "result.json"))
    arena = Arena(out, args.jobs)
    cells = list(quick() if args.quick else full(final=args.final))
    chosen = [cell for cell in cells if args.match in cell.name][: args.cells or None]
    if args.seconds is not None:
        chosen = [replace(cell, duration_s=args.seconds) for cell in chosen]
    if not args.draw:
        arena.run(chosen, args.recipes or (QUICK_RECIPES if args.quick else CORE))
        if not (args.recipes or is_short):
            arena.run([cell for cell in cells[::_RIVALS_EVERY] if cell in chosen], RIVALS)
    if not arena.cells:
        sys.exit("arena: there are no cells to show: run some without --draw, or with another --match")
    picture = Path(tempfile.gettempdir()) / "skipjoin-arena.png" if out is None else out.with_suffix(".png")
    style.save(draw(arena.cells), picture)
    harness.show(*(f"{line}\n" for line in table(summary(arena.cells))), f"oracle's gap: {oracle_gap(arena.cells)}\n",
                 f"picture: {picture}")  # fmt: skip


if __name__ == "__main__":
    main()
