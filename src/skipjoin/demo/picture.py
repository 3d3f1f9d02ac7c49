from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from skipjoin.config import ConfigError
from skipjoin.demo.load import BACKGROUND, CHAT
from skipjoin.demo.outcome import Outcome
from skipjoin.loadtest.client import Exchange
from skipjoin.report.plots import style
from skipjoin.system.disk import why_not_written

_COLORS = {BACKGROUND: style.SKY, CHAT: style.VERMILION}
_ROW_IN = 0.085
_WAIT_WIDTH, _RUN_WIDTH = 0.9, 3.4


def draw_demo(outcomes: Sequence[Outcome]) -> Figure:
    """Draw a row per request: thin until its first token, thick from there to its end."""
    rows = max(len(outcome.exchanges) for outcome in outcomes)
    figure = style.new_figure(style.WIDE_IN, 1.4 + _ROW_IN * rows)
    panels = figure.subplots(1, len(outcomes), sharex=True, sharey=True, squeeze=False)[0]
    for axes, outcome in zip(panels, outcomes, strict=True):
        _draw_histories(axes, outcome)
    panels[0].set_ylabel("requests, by arrival")
    panels[0].set_xlim(left=0)
    panels[0].invert_yaxis()
    handles = [Line2D([], [], color=_COLORS[stream], linewidth=_RUN_WIDTH, label=stream) for stream in _COLORS]
    handles.append(Line2D([], [], color=style.GREY, linewidth=_WAIT_WIDTH, label="before the first token"))
    handles.append(Line2D([], [], color=style.GREY, linewidth=_RUN_WIDTH, label="after it"))
    style.legend(figure, handles, [str(handle.get_label()) for handle in handles])
    return figure


def _draw_histories(axes: Axes, outcome: Outcome) -> None:
    for row, exchange in enumerate(sorted(outcome.exchanges, key=lambda exchange: exchange.job.at)):
        _draw_history(axes, row, exchange)
    ttft = outcome.chat["ttft_s"]
    figures = "" if ttft["p50"] is None else f"\nchat TTFT: p50 {ttft['p50']:.2f} s, p95 {ttft['p95']:.2f} s"
    axes.set_title(f"{outcome.name}{figures}", fontsize=9)
    axes.set_xlabel("time (s)")
    axes.tick_params(axis="y", labelleft=False, length=0)
    axes.grid(visible=False, axis="y")


def _draw_history(axes: Axes, row: int, exchange: Exchange) -> None:
    facts, color = exchange.facts, _COLORS.get(exchange.job.stream, style.GREY)
    if facts.ended is None:
        return
    first = facts.ended if facts.first_token is None else facts.first_token
    axes.plot([exchange.job.at, first], [row, row], color=color, linewidth=_WAIT_WIDTH, marker="")
    if facts.first_token is not None:
        # Butt ends, because round ones would lengthen a short answer.
        axes.plot([first, facts.ended], [row, row], color=color, linewidth=_RUN_WIDTH, solid_capstyle="butt", marker="")


def save_demo(outcomes: Sequence[Outcome], path: Path) -> None:
    try:
        with style.styled():
            style.save(draw_demo(outcomes), path)
    except OSError as error:
        raise ConfigError(f"out: {path}: {why_not_written(error, path)}") from error
