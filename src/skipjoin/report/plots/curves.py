from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from skipjoin.report.bound import Bound, MaximumRate, field_value
from skipjoin.report.plots import style
from skipjoin.report.plots.lines import Line, Warn, maximum_rates, need_rate, usable
from skipjoin.report.results import Record

RATE_LABEL = "arrival rate (req/s)"
_BAND_ALPHA = 0.15
# Line segments between two measured rates.
_STROKES = 16


def draw_latency(lines: Sequence[Line], metric: str, bound: Bound | None, warn: Warn) -> Figure:
    def need(record: Record) -> None:
        need_rate(record)
        field_value(record, metric)
        if bound is not None:
            bound.value(record)

    lines = usable("latency", lines, need, warn)
    figure = style.new_figure(style.NARROW_IN, 3.5)
    axes = figure.add_subplot()
    handles = []
    for line in lines:
        look = style.look(line.index)
        handle = _draw_curve(axes, line, metric)
        handle.set(color=look.color, marker=look.marker, linestyle=look.dash, label=line.label)
        handles.append(handle)
    values = [value for line in lines for value in _values(line, metric)]
    if bound is not None and bound.field == metric:
        handles.append(_draw_bound(axes, bound))
        values.append(bound.limit)
    style.log_where_wide(axes, axes.yaxis, values)
    if bound is not None:
        rates = maximum_rates(lines, bound, warn)
        _mark_rates(axes, [(line.index, rate) for line in lines if (rate := rates[line.label])], bound, metric)
    axes.set(xlabel=RATE_LABEL, ylabel=style.field_label(metric))
    style.legend(figure, handles, [str(handle.get_label()) for handle in handles])
    return figure


def draw_ttft_tpot(lines: Sequence[Line], bound: Bound | None, warn: Warn) -> Figure:
    fields = {metric: [f"{metric}.mean", f"{metric}.p95"] for metric in ("ttft_s", "tpot_s")}

    def need(record: Record) -> None:
        need_rate(record)
        for field in chain.from_iterable(fields.values()):
            field_value(record, field)

    lines = usable("ttft-tpot", lines, need, warn)
    figure = style.new_figure(style.WIDE_IN, 3.4)
    handles = _handles_of_statistics(lines)
    for axes, (metric, (mean, tail)) in zip(figure.subplots(1, 2), fields.items(), strict=True):
        for line in lines:
            look = style.look(line.index)
            common = {"color": look.color, "marker": look.marker}
            _draw_curve(axes, line, mean).set(**common, label=f"{line.label}, mean")
            _draw_curve(axes, line, tail).set(
                **common, linestyle="--", linewidth=1.0, markerfacecolor="white", label=f"{line.label}, p95"
            )
        values = [value for line in lines for field in (mean, tail) for value in _values(line, field)]
        if bound is not None and bound.field in (mean, tail):
            handles.append(_draw_bound(axes, bound))
            values.append(bound.limit)
        style.log_where_wide(axes, axes.yaxis, values)
        axes.set(xlabel=RATE_LABEL, ylabel=style.field_label(metric))
    style.legend(figure, handles, [str(handle.get_label()) for handle in handles])
    return figure


def _handles_of_statistics(lines: Sequence[Line]) -> list[Line2D]:
    handles = []
    for line in lines:
        look = style.look(line.index)
        handles.append(Line2D([], [], color=look.color, marker=look.marker, label=line.label))
    handles.append(Line2D([], [], color=style.GREY, marker="o", label="mean"))
    dashed = Line2D([], [], color=style.GREY, marker="o", ls="--", lw=1.0, markerfacecolor="white", label="p95")
    return [*handles, dashed]


def _values(line: Line, field: str) -> list[float]:
    return [field_value(record, field) for record in line.records]


def _draw_curve(axes: Axes, line: Line, field: str) -> Line2D:
    points = {rate: [field_value(r, field) for r in records] for rate, records in line.by_rate().items()}
    rates = _between(list(points))
    (curve,) = axes.plot(rates, _between([fmean(values) for values in points.values()]), markevery=_STROKES)
    least, most = (_between([end(values) for values in points.values()]) for end in (min, max))
    axes.fill_between(rates, least, most, color=style.look(line.index).color, alpha=_BAND_ALPHA, linewidth=0)
    return curve


def _between(values: Sequence[float]) -> list[float]:
    steps = [item + (other - item) * step / _STROKES for item, other in pairwise(values) for step in range(_STROKES)]
    return [*steps, values[-1]]


def _draw_bound(axes: Axes, bound: Bound) -> Line2D:
    label = f"bound {bound.limit:g}"
    return axes.axhline(bound.limit, color=style.BLACK, linestyle=(0, (4, 3)), linewidth=0.9, zorder=1.5, label=label)


def _mark_rates(axes: Axes, rates: Sequence[tuple[int, MaximumRate]], bound: Bound, metric: str) -> None:
    low, high = axes.get_xlim()
    axes.set_xlim(low, high)
    rates = sorted(rates, key=lambda pair: pair[1].rate_rps)
    positions = _spread([rate.rate_rps for _, rate in rates], (high - low) * 0.085, high)
    for (index, rate), position in zip(rates, positions, strict=True):
        color = style.look(index).color
        level, coordinates = (bound.limit, "data") if bound.field == metric else (0.0, "axes fraction")
        if bound.field == metric:
            axes.plot([rate.rate_rps], [level], marker="|", markersize=11, markeredgewidth=1.8, color=color)
        axes.annotate(
            str(rate),
            xy=(rate.rate_rps, level),
            xycoords=("data", coordinates),
            xytext=(position, 1.03),
            textcoords=("data", "axes fraction"),
            fontsize=8,
            ha="center",
            va="bottom",
            arrowprops={"arrowstyle": "-", "color": color, "linestyle": ":", "linewidth": 0.9, "shrinkB": 0},
        )


def _spread(positions: Sequence[float], gap: float, most: float) -> list[float]:
    spread: list[float] = []
    for position in positions:
        spread.append(max(position, spread[-1] + gap) if spread else position)
    limit = most
    for at in reversed(range(len(spread))):
        spread[at] = min(spread[at], limit)
        limit = spread[at] - gap
    return spread
