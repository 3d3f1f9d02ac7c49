from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from skipjoin.report.plots.style import legend, log_where_wide, look, new_figure, save, styled


def draw_distributions(path: Path, series: Mapping[str, Sequence[float]]) -> None:
    with styled():
        figure = new_figure(4.8, 3.2)
        axes = figure.add_subplot()
        handles = []
        for index, values in enumerate(series.values()):
            ordered = sorted(values)
            shares = [(at + 1) / len(ordered) for at in range(len(ordered))]
            style = look(index)
            handles += axes.plot(ordered, shares, color=style.color, linestyle=style.dash, drawstyle="steps-post")
        log_where_wide(axes, axes.xaxis, [value for values in series.values() for value in values])
        axes.set_xlabel("time to first token (s)")
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1)
        legend(figure, handles, list(series))
        save(figure, path)
