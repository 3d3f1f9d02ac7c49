"""What overlapped swap-ins gain, and what overlapped checkpoints and empty slots of real-time blocks could gain."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import (
    BATCHED,
    BROS,
    FIELDS,
    KEPT,
    LATENCY,
    MACHINES,
    SHAREGPT,
    TTFT_KEPT,
    records_of,
    said,
    window,
)
from papers.figures.pictures import bars, look
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, grid, mean, pick, run_plans
from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape
from skipjoin.report.plots import style
from skipjoin.sim.experiments.system import System

POINTS = {"opt-13b": (8.0, 12.0), "opt-30b": (10.0,)}
SEEDS = 3
PLAIN, BLOCKING, FREE, SLOTS = "bros", "blocking swap-ins", "free transfers", "blocks of one slot"


@dataclass(frozen=True, slots=True)
class FreeTransfers:
    """Cost model in which transfers take no time."""

    inner: CostModel

    @property
    def revision(self) -> int:
        return self.inner.revision

    @property
    def margin(self) -> float:
        return self.inner.margin

    def step(self, shape: StepShape) -> float:
        return self.inner.step(shape)

    def transfer(self, blocks: float) -> float:
        return 0.0


def systems(model: str) -> dict[str, System]:
    plain = BROS.on(MACHINES[model])
    free = replace(plain, cost=FreeTransfers(plain.cost))
    blocking = replace(plain, recipe=f"{Path(__file__).with_name('blocking.py')}:bros-blocking")
    return {PLAIN: plain, BLOCKING: blocking, FREE: free, SLOTS: BROS.on(replace(MACHINES[model], block_size=1))}


def measure(options: Options) -> Result:
    options = window(options)
    found = {(model, name): of for model in POINTS for name, of in systems(model).items()}
    plans = {key: grid(SHAREGPT.cells(BROS, of, POINTS[key[0]], options, seeds=SEEDS)) for key, of in found.items()}
    run_plans("limits", list(plans.values()), options)
    records = records_of(plans, "model", "limit")
    return {
        "settings": said([of for of in found.values() if of.recipe == "bros"], [SHAREGPT], options, seeds=SEEDS),
        "tables": [compared("Limits", records, ("model", "rate_rps", "limit"), FIELDS)],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    shown = {"s/token": LATENCY, "TTFT kept": TTFT_KEPT, "best effort (req/s)": BATCHED}
    shades = (look(name).color for name in ("bros", "bros-unshared", "bros-swap", "fcfs"))
    colors = dict(zip((PLAIN, BLOCKING, FREE, SLOTS), shades, strict=True))
    figure = style.new_figure(style.WIDE_IN, 2.4)
    cases = [(model, rate) for model, rates in POINTS.items() for rate in rates]
    for axes, (label, field) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        series = {
            name: [
                mean([one for one in pick(result["records"], model=model, limit=name) if rate_of(one) == rate], field)
                for model, rate in cases
            ]
            for name in colors
        }
        bars(axes, [f"{model}\n{rate:g} req/s" for model, rate in cases], series, colors)
        axes.set_title(label)
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"limits.png": figure}


def rate_of(record: Mapping[str, object]) -> object:
    return record["workload"]["rate_rps"]  # type: ignore[index]


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, LATENCY, BATCHED, TTFT_KEPT))
