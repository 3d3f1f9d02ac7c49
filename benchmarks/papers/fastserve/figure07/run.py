"""FastServe figure 7: worked example of three jobs, one at a time, under four schedulers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.figures.report import main, table
from papers.figures.runs import Options, Result
from papers.recipes import SPELLED
from skipjoin.core.events import Event, Finished, Planned
from skipjoin.core.step import StepShape
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.streams import Closed
from skipjoin.workload.workload import DEFAULT

UNIT_S = 0.5
# Prompt and output tokens. A token takes one unit, and the first output token comes with the prompt.
JOBS = ((5, 2), (2, 2), (1, 2))
PAPER = {"fcfs": ("FCFS", 4.23), "mlfq": ("MLFQ", 5.0), "fastserve": ("skip-join MLFQ", 3.3), "srpt": ("SRPT", 3.0)}


class UnitCost:
    """Cost model of one unit of time per token."""

    revision = 0
    margin = 1.0

    def step(self, shape: StepShape) -> float:
        return UNIT_S * (shape.prefill + shape.decodes)

    def transfer(self, blocks: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Example:
    """Workload of the three jobs at time 0."""

    best_effort: float | None = None
    closed: tuple[Closed, ...] = ()

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        return [WorkloadRequest(0.0, prompt, output, DEFAULT, 0) for prompt, output in JOBS]

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        return {"lengths": "worked example", "arrivals": "at once", "rate_rps": None, "seed": seed}


def timeline(recipe: str) -> tuple[list[list[float]], float]:
    """Return (start, end, job) of every iteration, and the mean completion time."""
    system = System(
        recipe=SPELLED[recipe],
        model="units",
        hardware="units",
        cost=UnitCost(),
        kv_blocks=100,
        block_bytes=1,
        max_model_len=100,
        max_num_seqs=1,
        recipe_params={"starvation_s": 1e9},
    )
    pieces: list[list[float]] = []
    ends: list[float] = []

    def watch(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Planned):
                (piece,) = event.plan.slices
                pieces.append([event.now, event.now + UNIT_S * piece.tokens, piece.request.id + 1])
            elif isinstance(event, Finished):
                ends.append(event.now)

    run(Cell(system, Example(), Extent(None, None, 0)), on_events=watch)
    return pieces, sum(ends) / len(ends)


def measure(options: Options) -> Result:
    found = {recipe: timeline(recipe) for recipe in PAPER}
    rows = [(name, *[f"{found[recipe][1]:.2f}", f"{paper:g}"]) for recipe, (name, paper) in PAPER.items()]
    spans = [
        (PAPER[recipe][0], ", ".join(f"J{job:g} {start:g}-{end:g}" for start, end, job in pieces))
        for recipe, (pieces, _) in found.items()
    ]
    return {
        "settings": {"case": "three jobs, one at a time, memory without end"},
        "tables": [
            table("Mean completion time, seconds", ("scheduler", "here", "paper"), rows),
            table("Iterations of each job, seconds", ("scheduler", "iterations"), spans),
        ],
        "timelines": {recipe: pieces for recipe, (pieces, _) in found.items()},
    }


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.NARROW_IN, 2.6)
    axes = figure.add_subplot()
    for row, pieces in enumerate(result["timelines"].values()):
        for start, end, job in pieces:
            axes.barh(row, end - start, left=start, color=style.COLORS[int(job) - 1], edgecolor="black", height=0.6)
            axes.annotate(f"J{int(job)}", ((start + end) / 2, row), ha="center", va="center", fontsize=7, color="white")
    means = [row[1] for row in result["tables"][0]["rows"]]
    names = [f"{name} (mean {mean})" for (name, _), mean in zip(PAPER.values(), means, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time (s)")
    return {"timelines.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
