"""FastServe figure 8: KV over time under `fcfs` and skip-join MLFQ with unlimited memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.fastserve.setting import MAX_TOKENS
from papers.figures.pictures import legend_of, look
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Options, Result, slim
from skipjoin.core.events import Event, Planned
from skipjoin.observe.record import Record
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import synthetic

RATE_RPS, CAPS, RECIPES = 64.0, (16, 32, 64, 128), ("fcfs", "fastserve")
WORKLOAD = synthetic("uniform:1-512,1-20", "gamma:4")
ENDLESS_BLOCKS = 200_000
# Points of the picture, each the maximum of an interval, and seconds that it shows.
INTERVALS, DRAWN_S = 400, 60.0


def held(of: System, duration_s: float, seed: int) -> tuple[Record, int, list[int]]:
    """Return the record, the maximum number of blocks, and the maximum in each interval of the first minute."""
    peaks = [0] * INTERVALS
    most = 0

    def watch(events: list[Event]) -> None:
        nonlocal most
        for event in events:
            if isinstance(event, Planned):
                most = max(most, event.held)
                place = int(event.now / DRAWN_S * INTERVALS)
                if place < INTERVALS:
                    peaks[place] = max(peaks[place], event.held)

    return run(Cell(of, WORKLOAD, Extent(RATE_RPS, duration_s, seed)), on_events=watch), most, peaks


def measure(options: Options) -> Result:
    machine = Machine(model="opt-2.7b", hardware="a100-40gb", swap_gib=0.0)
    rows, records, series, systems = [], [], {}, []
    for cap in CAPS:
        of = {
            system.recipe: replace(system, kv_blocks=ENDLESS_BLOCKS)
            for system in machine.systems(",".join(RECIPES), max_num_seqs=cap, max_tokens=MAX_TOKENS)
        }
        systems += of.values()
        for seed in options.seeds():
            found = {recipe: held(system, options.duration_s, seed) for recipe, system in of.items()}
            records += [slim(record) for record, _, _ in found.values()]
            fcfs, skip_join = (found[recipe] for recipe in RECIPES)
            latencies = [one[0]["jct_s"]["mean"] for one in (fcfs, skip_join)]
            rows.append((cap, seed, fcfs[1], skip_join[1], skip_join[1] / fcfs[1], *latencies))
            if seed == 0:
                series[str(cap)] = {recipe: one[2] for recipe, one in found.items()}
    columns = ("cap", "seed", "fcfs, blocks", "fastserve, blocks", "ratio", "fcfs, latency s", "fastserve, latency s")
    return {
        "settings": settings_of(systems, [WORKLOAD], options),
        "tables": [table("Most KV blocks held (paper: 7x)", columns, rows)],
        "series": series,
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 4.4)
    panels = figure.subplots(2, 2, sharex=True)
    block_mib = 16 * 2 * 32 * 2560 * 2 / 2**20  # of OPT-2.7B
    for axes, (cap, lines) in zip(panels.flat, result["series"].items(), strict=True):
        times = [index * DRAWN_S / INTERVALS for index in range(INTERVALS)]
        for recipe in RECIPES:
            values = [blocks * block_mib / 1024 for blocks in lines[recipe]]
            axes.plot(times, values, color=look(recipe).color, linestyle=look(recipe).dash, lw=1.0, label=recipe)
        axes.set_title(f"batch cap {cap}")
    for axes in panels[1]:
        axes.set_xlabel("time (s)")
    for axes in panels[:, 0]:
        axes.set_ylabel("KV held (GiB)")
    legend_of(figure, panels[0][0])
    return {"kv-held.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
