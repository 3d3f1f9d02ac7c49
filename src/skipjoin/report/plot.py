from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from skipjoin.config import ConfigError
from skipjoin.report.bound import Bound, field_value
from skipjoin.report.plots import style
from skipjoin.report.plots.curves import draw_latency, draw_ttft_tpot
from skipjoin.report.plots.lines import Line, NothingToDrawError, Warn, lines_of, same_rate
from skipjoin.report.plots.snapshots import draw_breakdown, draw_cdf, draw_kv
from skipjoin.report.results import Record, basis_text, rate_of

METRIC = "normalized_latency_s.mean"
SUFFIXES: tuple[str, ...] = (".png", ".svg")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    metric: str | None = None  # field of a "latency" plot; None uses the bound's, or else the mean normalized latency
    bound: Bound | None = None  # drawn in plots of its field, with each system's maximum rate
    rate_rps: float | None = None

    def shown(self) -> str:
        return self.metric or (self.bound.field if self.bound else METRIC)


_DRAW: dict[str, Callable[[Sequence[Line], View, Warn], Figure]] = {
    "latency": lambda lines, view, warn: draw_latency(lines, view.shown(), view.bound, warn),
    "cdf": lambda lines, view, warn: draw_cdf(lines, view.rate_rps, warn),
    "ttft-tpot": lambda lines, view, warn: draw_ttft_tpot(lines, view.bound, warn),
    "breakdown": lambda lines, view, warn: draw_breakdown(lines, view.rate_rps, warn),
    "kv": lambda lines, view, warn: draw_kv(lines, view.rate_rps, warn),
}
KINDS = (*_DRAW, "all")


def draw(records: Sequence[Record], kind: str, view: View, warn: Warn) -> Figure:
    if kind not in _DRAW:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}{hint}")
    _check(records, view)
    with style.styled():
        figure = _DRAW[kind](lines_of(records), view, warn)
        style.note(figure, list(dict.fromkeys(filter(None, map(basis_text, records)))))
    return figure


def default_kind(records: Sequence[Record], view: View) -> str:
    has_curve = len({rate_of(record) for record in records}) > 1 or view.metric is not None or view.bound is not None
    return "latency" if has_curve else "cdf"


def plot_results(records: Sequence[Record], kind: str, out: Path, view: View, warn: Warn) -> list[Path]:
    """Draw one kind of plot, or "all" that the records allow, and return the paths written.

    Without .png or .svg, `out` stands for both. For "all" it is a prefix. In an existing folder, files are named by
    kind.
    """
    if kind != "all":
        paths = _paths(out, kind, prefix=False)
        return _save(draw(records, kind, view, warn), paths)
    written = []
    for each in _DRAW:
        paths = _paths(out, each, prefix=True)
        try:
            figure = draw(records, each, view, warn)
        except NothingToDrawError as error:
            warn(str(error))
        else:
            written += _save(figure, paths)
    if not written:
        raise NothingToDrawError("the results allow no kind of picture")
    return written


def _check(records: Sequence[Record], view: View) -> None:
    if not records:
        raise ConfigError("the results hold no records")
    for field in (view.metric, view.bound.field if view.bound else None):
        if field is None:
            continue
        problems = []
        for record in records:
            try:
                field_value(record, field)
            except ConfigError as error:
                problems.append(error)
        if len(problems) == len(records):
            raise problems[0]
    rate = view.rate_rps
    if rate is not None and not any(same_rate(rate_of(record), rate) for record in records):
        measured = sorted({found for record in records if (found := rate_of(record)) is not None})
        raise ConfigError(f"rate {rate:g} was not measured; choose one of {', '.join(f'{r:g}' for r in measured)}")


def _paths(out: Path, kind: str, *, prefix: bool) -> list[Path]:
    suffixes, base = SUFFIXES, out
    if out.is_dir():
        base = out / kind
    else:
        if out.suffix in SUFFIXES:
            suffixes, base = (out.suffix,), out.with_suffix("")
        elif re.fullmatch(r"\.[A-Za-z]\w*", out.suffix):  # not the .5 of "rate-2.5"
            raise ConfigError(f"out must end in {' or '.join(SUFFIXES)}, or in neither for both, got {out}")
        if not out.parent.is_dir():
            raise ConfigError(f"out: there is no folder {out.parent}")
        if prefix:
            base = base.with_name(f"{base.name}-{kind}")
    return [base.with_name(base.name + suffix) for suffix in suffixes]


def check_picture(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")


def _save(figure: Figure, paths: Sequence[Path]) -> list[Path]:
    with style.styled():
        for path in paths:
            style.save(figure, path)
    return list(paths)
