"""The panels of figures 11 and 12: a metric of the same runs against rate, for each model and dataset."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from fastserve.setting import BATCH_CAP, MACHINES, RECIPES, system
from figures.pictures import bound_line, curves, legend_of
from figures.report import rates_table, ratio_of, table
from figures.runs import Options, Result, Search, by_rate, cells, pick, poisson
from skipjoin.bench.bound import maximum_rate, parse_bound
from skipjoin.bench.plots import style
from skipjoin.observe.record import Record

DATASETS = ("sharegpt", "alpaca")
# Searches start here: req/s of OPT-13B on ShareGPT, by batch cap and recipe.
STARTS = {
    BATCH_CAP: {"static": 0.6, "fcfs": 3.5, "fastserve": 5.5, "srpt": 9.8},
    16: {"static": 0.4, "fcfs": 2.15, "fastserve": 2.7, "srpt": 4.5},
}


class Searches:
    """Searches for the largest rate of OPT-13B on ShareGPT under a bound, at each batch cap, with each recipe."""

    def __init__(self, bound: str, options: Options) -> None:
        self._bound = bound
        self._found = {
            cap: {
                recipe: Search(
                    cells(
                        system(recipe, batch_cap=cap),
                        poisson("sharegpt"),
                        [STARTS[cap][recipe]],
                        options,
                    ),
                    bound,
                )
                for recipe in RECIPES
            }
            for cap in STARTS
        }

    @property
    def plans(self) -> list[Search]:
        return [search for of_cap in self._found.values() for search in of_cap.values()]

    def tables(self) -> list[Result]:
        """The largest rates, for each cap."""
        return [
            rates_table(f"Largest rate with {self._bound}: opt-13b, sharegpt, batch cap {cap}", of_cap)
            for cap, of_cap in self._found.items()
        ]

    def tried(self) -> Result:
        """Rates and values by cap and recipe."""
        return {
            f"{recipe}, batch cap {cap}": search.tried()
            for cap, of_cap in self._found.items()
            for recipe, search in of_cap.items()
        }


def read_off(records: Sequence[Record], bound: str) -> Result:
    """Largest rates by linear interpolation between the measured ones."""
    rows = []
    for dataset in DATASETS:
        for model in MACHINES:
            found = {
                recipe: maximum_rate(
                    by_rate(pick(records, recipe=recipe, model=model, lengths=dataset)), parse_bound(bound)
                )
                for recipe in RECIPES
            }
            texts = ["none" if rate is None else str(rate) for rate in found.values()]
            ratios = [ratio_of(found["fastserve"], found[other]) for other in ("fcfs", "static", "srpt")]
            rows.append((model, dataset, *texts, *ratios))
    columns = ("model", "lengths", *RECIPES, "fastserve to fcfs", "to static", "to srpt")
    return table(f"Largest rate with {bound}, read off the curves (req/s)", columns, rows)


def draw_panels(records: Sequence[Record], field: str, limit: float) -> Figure:
    """A row for each dataset, a column for each model."""
    figure = style.new_figure(style.WIDE_IN, 4.6)
    panels = figure.subplots(len(DATASETS), len(MACHINES), squeeze=False)
    for dataset, line in zip(DATASETS, panels, strict=True):
        for model, axes in zip(MACHINES, line, strict=True):
            curves(axes, pick(records, model=model, lengths=dataset), RECIPES, field)
            bound_line(axes, limit)
            axes.set_yscale("log")
            axes.set_ylim(0.02, 20)
            axes.set_xlim(left=0)
            axes.set_title(f"{model}, {dataset}")
    for axes in panels[-1]:
        axes.set_xlabel("arrival rate (req/s)")
    figure.supylabel(style.field_label(field), fontsize=9)
    legend_of(figure, panels[0][0])
    return figure
