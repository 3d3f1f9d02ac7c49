"""The panels of figures 11 and 12: a metric of the same runs by rate, for each model and dataset."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from papers.fastserve.setting import BATCH_CAP, MACHINES, RECIPES, system
from papers.figures.panels import Panels
from papers.figures.report import rates_table
from papers.figures.runs import Options, Result, Search, cells, poisson
from skipjoin.observe.record import Record

DATASETS = ("sharegpt", "alpaca")
PANELS = Panels(tuple(MACHINES), DATASETS, RECIPES)
# First rates of the searches, in requests per second of OPT-13B on ShareGPT, by batch cap and recipe.
STARTS = {
    BATCH_CAP: {"static": 0.6, "fcfs": 3.5, "fastserve": 5.5, "srpt": 9.8},
    16: {"static": 0.4, "fcfs": 2.15, "fastserve": 2.7, "srpt": 4.5},
}


class Searches:
    """Searches for the largest rate of OPT-13B on ShareGPT under a bound, by batch cap and recipe."""

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
        """Return the table of largest rates for each batch cap."""
        return [
            rates_table(f"Largest rate with {self._bound}: opt-13b, sharegpt, batch cap {cap}", of_cap)
            for cap, of_cap in self._found.items()
        ]

    def tried(self) -> Result:
        """Return rates and values by batch cap and recipe."""
        return {
            f"{recipe}, batch cap {cap}": search.tried()
            for cap, of_cap in self._found.items()
            for recipe, search in of_cap.items()
        }


def read_off(records: Sequence[Record], bound: str) -> Result:
    """Return the table of largest rates by linear interpolation."""
    return PANELS.read_off(records, bound, [("fastserve", other) for other in ("fcfs", "static", "srpt")])


def draw_panels(records: Sequence[Record], field: str, limit: float) -> Figure:
    """Draw a row per dataset and a column per model."""
    return PANELS.draw(records, field, limit, (0.02, 20))
