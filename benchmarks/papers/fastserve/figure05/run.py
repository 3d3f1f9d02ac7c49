"""FastServe figure 5: the first four iterations of a request by prompt length."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.figures.pictures import bars, legend_of
from papers.figures.report import main, table
from papers.figures.runs import Options, Result
from skipjoin.core.step import StepShape
from skipjoin.report.plots import style
from skipjoin.sim.hardware import parse_hardware
from skipjoin.sim.models import model_shape
from skipjoin.sim.roofline import RooflineCost

MODEL, HARDWARE = "opt-2.7b", "a100-40gb"
PROMPTS, ITERATIONS = (64, 128, 256, 512, 1024, 2000), 4


def measure(options: Options) -> Result:
    cost = RooflineCost(model_shape(MODEL), parse_hardware(HARDWARE))
    rows = []
    for prompt in PROMPTS:
        first = cost.step(StepShape(prefill=prompt, attention=prompt * (prompt + 1) // 2))
        later = [cost.step(StepShape(decodes=1, context=prompt + number)) for number in range(1, ITERATIONS)]
        rows.append((prompt, *(1e3 * seconds for seconds in (first, *later)), first / later[0]))
    columns = ("prompt tokens", *(f"iteration {number + 1}, ms" for number in range(ITERATIONS)), "first / second")
    return {
        "settings": {"case": f"{MODEL} on {HARDWARE}, one request alone, from the cost model"},
        "tables": [table("Time of the first iterations", columns, rows)],
    }


def draw(result: Result) -> Mapping[str, Figure]:
    rows = result["tables"][0]["rows"]
    figure = style.new_figure(style.NARROW_IN, 3.2)
    axes = figure.add_subplot()
    series = {f"iteration {number}": [row[number] for row in rows] for number in range(1, ITERATIONS + 1)}
    bars(axes, [str(row[0]) for row in rows], series, dict(zip(series, style.COLORS, strict=False)))
    axes.set(xlabel="prompt tokens", ylabel="time (ms)")
    legend_of(figure, axes)
    return {"iterations.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
