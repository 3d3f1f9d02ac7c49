"""Style of all plots: for print, color-blind readers and grayscale. Equal results give equal bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from skipjoin.config import ConfigError
from skipjoin.system.disk import why_not_written

# Okabe and Ito, "Color Universal Design", without yellow, which is hard to see on white paper.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
)  # fmt: skip
GREY = "#666666"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
# The numbers of colors, markers and dashes (7, 8, 5) are coprime, so that 280 lines have different looks.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
WIDE_IN = 7.0
NARROW_IN = 5.4
# Ratio of largest to smallest value beyond which a linear axis hides the small values.
LOG_RANGE = 30.0
# Ratio below which 1, 2 and 5 of each decade are labeled, instead of decades only.
FEW_DECADES = 300.0
PNG_DPI = 200
_LEGEND_ROW_IN = 0.17
_MAX_NOTES = 3
# Width of an 8 pt character.
_CHARACTER_PT = 4.6

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "skipjoin",
}
_KNOWN = {
    "normalized_latency_s": ("normalized latency", "s/token"),
    "ttft_s": ("TTFT", "s"),
    "tpot_s": ("TPOT", "s/token"),
    "jct_s": ("completion time", "s"),
    "queue_s": ("time in queue", "s"),
}
_UNITS = {"_s": "s", "_rps": "req/s", "_tps": "tokens/s", "_bytes": "bytes"}


@dataclass(frozen=True, slots=True)
class Look:
    color: str
    marker: str
    dash: str | tuple[int, tuple[int, ...]]


def look(index: int) -> Look:
    return Look(COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)])


@contextmanager
def styled() -> Iterator[None]:
    with matplotlib.style.context(["default", _RC]):
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    figure = Figure(figsize=(width_in, height_in), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    try:
        figure.savefig(path, dpi=PNG_DPI, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"{path}: {why_not_written(error, path)}") from error


def legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], title: str | None = None) -> None:
    columns = next(count for count in range(len(labels), 0, -1) if count == 1 or _fits(figure, labels, count))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + (rows - 1) * _LEGEND_ROW_IN)
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, title=title)


def note(figure: Figure, texts: Sequence[str]) -> None:
    if texts:
        width = round(figure.get_figwidth() * 72 / _CHARACTER_PT)
        lines = [textwrap.fill(text, width) for text in texts[:_MAX_NOTES]]
        if len(texts) > _MAX_NOTES:
            lines.append(f"and {len(texts) - _MAX_NOTES} more")
        figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_IN * sum(text.count("\n") + 1 for text in lines))
        figure.supxlabel("\n".join(lines), fontsize=8, color=GREY)


def _fits(figure: Figure, labels: Sequence[str], columns: int) -> bool:
    # If labels do not divide evenly, the first columns have one more.
    rows, longer = divmod(len(labels), columns)
    ends = [number * rows + min(number, longer) for number in range(columns + 1)]
    widest = [max(map(len, labels[start:end])) for start, end in pairwise(ends)]
    # The handle and the gaps take 40 pt.
    return sum(widest) * _CHARACTER_PT + len(widest) * 40 <= figure.get_figwidth() * 72


def field_label(field: str) -> str:
    *path, last = field.split(".")
    owner = f"{path[1]}: " if len(path) > 1 and path[0] == "classes" else ""
    if path and path[-1] in _KNOWN:
        name, unit = _KNOWN[path[-1]]
        return f"{owner}{name}, {last} ({unit})"
    if last in _KNOWN:
        name, unit = _KNOWN[last]
        return f"{owner}{name} ({unit})"
    unit = next((unit for suffix, unit in _UNITS.items() if last.endswith(suffix)), "")
    return f"{field} ({unit})" if unit else field


def log_where_wide(axes: Axes, axis: Axis, values: Iterable[float]) -> None:
    known = list(values)
    low, high = min(known), max(known)
    if low <= 0 or high / low <= LOG_RANGE:
        return
    (axes.set_yscale if axis is axes.yaxis else axes.set_xscale)("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < FEW_DECADES else (1.0,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
