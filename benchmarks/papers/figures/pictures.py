"""Elements of the pictures: a look per recipe, curves by rate, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from papers.figures.runs import by_rate, pick
from skipjoin.observe.record import Record
from skipjoin.report.bound import field_value
from skipjoin.report.plots import style

# A recipe has the same look in every figure, and no two recipes of a figure share one of the seven colors.
_INDEX = {
    "fcfs": 0,
    "fastserve": 1,
    "srpt": 2,
    "static": 3,
    "mlfq": 4,
    "fixed-priority": 5,
    "fastserve-reactive": 6,
    "fastserve-recompute": 7,
    "fastserve-defer": 9,
    "orca": 3,
    "orca-exact": 7,
    "alise": 4,
    "alise-oracle": 2,
    "alise-reactive": 6,
    "alise-recompute": 7,
    "alise-defer": 9,
    # ALISE by forecaster.
    "alise noise:0.2": 4,
    "alise regress:0.8": 5,
    "alise regress:0.6": 6,
    "alise regress:0.3": 10,
    "alise prior": 3,
    "alise learned": 4,
    "alise trained hashed": 6,
    "alise trained minilm": 4,
    "alise proxy": 5,
    "alise retrieval": 5,
    "sarathi": 5,
    "multires": 6,
    "synccoupled": 12,
    # EconoServe by ablation and by forecaster.
    "econoserve": 8,
    "econoserve-sdo": 7,
    "econoserve-sd": 9,
    "econoserve-d": 10,
    "econoserve, oracle": 11,
    "econoserve, defaults": 11,
    "econoserve, prior": 13,
    "split": 2,
    # BROS and its baselines.
    "fcfs, class-blind": 13,
    "round-robin": 3,
    "longest-wait": 3,
    "bros-recompute": 5,
    "bros-swap": 4,
    "bros-unshared": 6,
    "bros": 9,
    "bros, noise 0.1": 8,
}


def look(name: str) -> style.Look:
    """Return the color, marker and dashes of a recipe or variant."""
    return style.look(_INDEX[name])


def curves(axes: Axes, records: Sequence[Record], names: Sequence[str], field: str, *, by: str = "recipe") -> None:
    """Draw a field by rate: for each name a line through the means over seeds and a band over their range.

    Args:
        by: Field of a record that has the name of its line.
    """
    for name in names:
        points = by_rate(pick(records, **{by: name}))
        if not points:
            continue
        values = [[field_value(record, field) for record in some] for some in points.values()]
        shape = look(name)
        axes.plot(
            list(points),
            list(map(fmean, values)),
            color=shape.color,
            marker=shape.marker,
            linestyle=shape.dash,
            label=name,
        )
        axes.fill_between(
            list(points), list(map(min, values)), list(map(max, values)), color=shape.color, alpha=0.15, lw=0
        )


def bound_line(axes: Axes, limit: float) -> None:
    axes.axhline(limit, color=style.BLACK, linestyle=(0, (4, 3)), linewidth=0.9, zorder=1.5, label=f"bound {limit:g}")


def bars(axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> None:
    """Draw a bar per series in each group, with its value above."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [index + (number - (len(series) - 1) / 2) * width for index in range(len(groups))]
        axes.bar(places, values, width, color=colors[name], edgecolor="black", lw=0.5, label=name)
        for place, value in zip(places, values, strict=True):
            axes.annotate(
                f"{value:.2g}" if value < 99.5 else f"{value:.0f}",
                (place, value),
                (0, 1),
                textcoords="offset points",
                ha="center",
                fontsize=6,
            )
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")


def legend_of(figure: Figure, axes: Axes, title: str | None = None) -> None:
    """Draw a legend above the panels, for the lines of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    style.legend(figure, handles, labels, title)


def colors_of(recipes: Sequence[str]) -> dict[str, str]:
    return {recipe: look(recipe).color for recipe in recipes}
