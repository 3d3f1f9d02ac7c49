from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from skipjoin.config import ConfigError
from skipjoin.report.bound import field_value
from skipjoin.report.numbers import number
from skipjoin.report.plots import style
from skipjoin.report.plots.lines import Line, NothingToDrawError, Warn, at_one_rate, usable
from skipjoin.report.results import Record

_CDF_METRICS = ("normalized_latency_s", "ttft_s", "tpot_s", "jct_s")
# Color and hatch of each part. Colors are light enough for the hatch to be visible.
_PARTS = {
    "queueing": (style.ORANGE, "///"),
    "execution": (style.SKY, ""),
    "swapping": (style.VERMILION, "xxx"),
    "scheduling": ("#BBBBBB", "..."),
}
_SERIES = ("time_s", "kv_used", "kv_allocated", "running", "waiting")
_MAX_COLUMNS = 4
# Number of 8 pt characters above one of four columns.
_TITLE_WIDTH = 26


def draw_cdf(lines: Sequence[Line], rate_rps: float | None, warn: Warn) -> Figure:
    lines = usable("cdf", lines, _need_some_quantiles, warn)
    rate_rps, lines = at_one_rate("cdf", lines, rate_rps, warn)
    panels = {}
    for metric in _CDF_METRICS:
        with suppress(NothingToDrawError):
            panels[metric] = usable("cdf", lines, partial(_quantiles, metric=metric), warn)
    rows = (len(panels) + 1) // 2
    figure = style.new_figure(style.WIDE_IN, 2.4 * rows + 0.5)
    handles = {}
    for panel, (metric, shown) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, min(2, len(panels)), panel)
        for line in shown:
            handles[line.label] = _draw_cdf(axes, line, metric)
        axes.locator_params(axis="x", nbins=5)
        # The axis is chosen without the extremes, which are single requests.
        style.log_where_wide(axes, axes.xaxis, [x for line in shown for x in _mean_quantiles(line, metric)[1:100]])
        axes.set(xlabel=style.field_label(metric), ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if panel % 2:
            axes.set_ylabel("share of requests")
    style.legend(figure, list(handles.values()), list(handles), _at(rate_rps))
    return figure


def _draw_cdf(axes: Axes, line: Line, metric: str) -> Line2D:
    look = style.look(line.index)
    values = _mean_quantiles(line, metric)
    (curve,) = axes.plot(
        values,
        [percent / 100 for percent in range(len(values))],
        color=look.color,
        linestyle=look.dash,
        marker=look.marker,
        # Staggered, so that markers of coinciding lines remain visible.
        markevery=(5 + 3 * line.index % 20, 20),
        label=line.label,
    )
    return curve


def draw_breakdown(lines: Sequence[Line], rate_rps: float | None, warn: Warn) -> Figure:
    lines = usable("breakdown", lines, _breakdown, warn)
    rate_rps, lines = at_one_rate("breakdown", lines, rate_rps, warn)
    figure = style.new_figure(style.NARROW_IN, 1.3 + 0.38 * len(lines))
    axes = figure.add_subplot()
    labels = [line.label for line in lines]
    ends = [0.0] * len(lines)
    for part, (color, hatch) in _PARTS.items():
        widths = [fmean(_breakdown(record)[part] for record in line.records) for line in lines]
        axes.barh(
            labels, widths, left=ends, height=0.62, color=color, hatch=hatch, edgecolor="black", lw=0.6, label=part
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for panel, end in enumerate(ends):
        axes.annotate(number(end), (end, panel), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.invert_yaxis()
    # Leaves space for the number at the longest bar; empty bars still need an axis.
    axes.set_xlim(0, 1.1 * max(ends) or 1.0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time per request, mean (s)")
    handles, parts = axes.get_legend_handles_labels()
    style.legend(figure, handles, parts, _at(rate_rps))
    return figure


def draw_kv(lines: Sequence[Line], rate_rps: float | None, warn: Warn) -> Figure:
    lines = usable("kv", lines, _series, warn)
    rate_rps, lines = at_one_rate("kv", lines, rate_rps, warn)
    columns = min(len(lines), _MAX_COLUMNS)
    rows = -(-len(lines) // columns)
    figure = style.new_figure(max(style.NARROW_IN, columns * style.WIDE_IN / _MAX_COLUMNS), 3.6 * rows + 0.4)
    grid = figure.subplots(2 * rows, columns, sharex=True, sharey="row", squeeze=False)
    for panel, line in enumerate(lines):
        row, column = divmod(panel, columns)
        _draw_series(grid[2 * row][column], grid[2 * row + 1][column], line)
    for row in range(rows):
        grid[2 * row][0].set_ylabel("share of KV memory")
        grid[2 * row + 1][0].set_ylabel("requests")
        # Set last, because a limit set before the whole row is drawn would cut off later columns.
        grid[2 * row + 1][0].set_ylim(bottom=0)
    for column in range(len(lines) - (rows - 1) * columns, columns):
        grid[-2][column].set_axis_off()
        grid[-1][column].set_axis_off()
    handles, labels = [], []
    for axes in grid[0][0], grid[1][0]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.append(handle)
            labels.append(label)
    style.legend(figure, handles, labels, _at(rate_rps))
    return figure


def _draw_series(shares: Axes, counts: Axes, line: Line) -> None:
    series = _series(min(line.records, key=lambda record: record["workload"].get("seed") or 0))
    time_s = series["time_s"]
    shares.fill_between(time_s, series["kv_used"], color=style.SKY, alpha=0.5, linewidth=0, label="KV used")
    shares.plot(time_s, series["kv_allocated"], color=style.BLACK, linewidth=0.9, label="KV allocated")
    shares.set_ylim(0, 1.02)
    shares.set_title(textwrap.fill(line.label, _TITLE_WIDTH), fontsize=8)
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    counts.plot(time_s, series["running"], color=style.GREEN, linewidth=1.2, label="running")
    counts.plot(time_s, series["waiting"], color=style.VERMILION, linewidth=1.2, linestyle="--", label="waiting")
    counts.set_xlabel("time (s)")
    counts.tick_params(labelbottom=True)


def _need_some_quantiles(record: Record) -> None:
    if not any((record.get("quantiles") or {}).values()):
        raise ConfigError("quantiles are empty")


def _quantiles(record: Record, metric: str) -> list[float]:
    values: list[float] = (record.get("quantiles") or {}).get(metric) or []
    if not values:
        raise ConfigError(f"quantiles.{metric} is empty")
    return values


def _mean_quantiles(line: Line, metric: str) -> list[float]:
    return [fmean(values) for values in zip(*(_quantiles(record, metric) for record in line.records), strict=True)]


def _breakdown(record: Record) -> dict[str, float]:
    parts: dict[str, float] | None = record.get("breakdown_s")
    if parts is None:
        raise ConfigError("breakdown_s is null")
    for part in _PARTS:
        field_value(record, f"breakdown_s.{part}")
    return parts


def _series(record: Record) -> dict[str, list[float]]:
    series: dict[str, list[float]] = record.get("series") or {}
    if missing := [name for name in _SERIES if not series.get(name)]:
        raise ConfigError(f"series has no {', '.join(missing)}" if series else "series is null")
    return series


def _at(rate_rps: float | None) -> str | None:
    return None if rate_rps is None else f"at {rate_rps:g} req/s"
