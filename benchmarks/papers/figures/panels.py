"""Panels of a metric by rate for each model and dataset, and the largest rates under a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from papers.figures.pictures import bound_line, curves, legend_of
from papers.figures.report import ratio_of, table
from papers.figures.runs import Result, by_rate, pick
from skipjoin.observe.record import Record
from skipjoin.report.bound import maximum_rate, parse_bound
from skipjoin.report.plots import style


@dataclass(frozen=True, slots=True)
class Panels:
    """A grid of panels: a column per model, a row per dataset, and in each panel a line per name.

    Attributes:
        by: Field of a record that has the name, "recipe" or "variant".
    """

    models: Sequence[str]
    datasets: Sequence[str]
    names: Sequence[str]
    by: str = "recipe"

    def read_off(self, records: Sequence[Record], bound: str, ratios: Sequence[tuple[str, str]]) -> Result:
        """Return the table of largest rates by linear interpolation; `ratios` are pairs of names to compare."""
        rows = []
        for dataset in self.datasets:
            for model in self.models:
                found = {
                    name: maximum_rate(
                        by_rate(pick(records, model=model, lengths=dataset, **{self.by: name})), parse_bound(bound)
                    )
                    for name in self.names
                }
                texts = ["none" if rate is None else str(rate) for rate in found.values()]
                compared = [ratio_of(found[one], found[other]) for one, other in ratios]
                rows.append((model, dataset, *texts, *compared))
        columns = ("model", "lengths", *self.names, *(f"{one} to {other}" for one, other in ratios))
        return table(f"Largest rate with {bound}, read off the curves (req/s)", columns, rows)

    def draw(self, records: Sequence[Record], field: str, limit: float, span: tuple[float, float]) -> Figure:
        """Draw the panels with a line at the bound `limit`; `span` is the range of the logarithmic vertical axis."""
        figure = style.new_figure(style.WIDE_IN, 0.6 + 2.0 * len(self.datasets))
        panels = figure.subplots(len(self.datasets), len(self.models), squeeze=False)
        for dataset, line in zip(self.datasets, panels, strict=True):
            for model, axes in zip(self.models, line, strict=True):
                curves(axes, pick(records, model=model, lengths=dataset), self.names, field, by=self.by)
                bound_line(axes, limit)
                axes.set_yscale("log")
                axes.set_ylim(*span)
                axes.set_xlim(left=0)
                axes.set_title(f"{model}, {dataset}")
        for axes in panels[-1]:
            axes.set_xlabel("arrival rate (req/s)")
        figure.supylabel(style.field_label(field), fontsize=9)
        legend_of(figure, panels[0][0])
        return figure
