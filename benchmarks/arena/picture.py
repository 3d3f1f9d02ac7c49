"""One picture of all cells: our ratio to the best of the others, by metric and load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from arena.figures import GOALS, OURS, REFERENCE, TITLES, ratios
from skipjoin.report.plots import style


def draw(cells: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return a panel per metric with a dot for each cell, colored by lengths."""
    with style.styled():
        figure = style.new_figure(style.WIDE_IN, 2.6)
        panels = figure.subplots(1, len(TITLES), sharex=True)
        names = sorted({one["lengths"] for one in cells.values()})
        for axes, metric in zip(panels, TITLES, strict=True):
            for number, lengths in enumerate(names):
                shape = style.look(number)
                points = [
                    (one["load"], ratios(one["recipes"])[metric])
                    for one in cells.values()
                    if one["lengths"] == lengths and {OURS, REFERENCE} <= one["recipes"].keys()
                ]
                if points:
                    axes.scatter(*zip(*points, strict=True), s=9, color=shape.color, marker=shape.marker, label=lengths)
            axes.axhline(1.0, color=style.BLACK, linewidth=0.9)
            axes.axhline(GOALS[metric][1], color=style.GREY, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.set_title(TITLES[metric].replace(" normalized", "\nnormalized").replace(", ", ",\n"), fontsize=8)
            axes.set_xlabel("load")
            found = [
                ratios(one["recipes"])[metric] for one in cells.values() if {OURS, REFERENCE} <= one["recipes"].keys()
            ]
            style.log_where_wide(axes, axes.yaxis, found)
        panels[0].set_ylabel("ours over the best of the others")
        handles, labels = panels[0].get_legend_handles_labels()
        style.legend(figure, handles, labels, None)
    return figure
