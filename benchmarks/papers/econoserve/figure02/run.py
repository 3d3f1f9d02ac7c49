"""EconoServe figure 2: size of the groups that start and finish together.

    python benchmarks/papers/econoserve/figure02/run.py [--quick]

OPT-13B on one A100 under `econoserve-sd` with known lengths at 1.2 times the capacity of `fcfs`. Lengths belong
together if they are equal, or if they are in one range of 32 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import SYNCED, TRACES, known, loaded, said, system
from papers.econoserve.watch import watched
from papers.figures.report import main, table
from papers.figures.runs import Options, Result, pick
from skipjoin.observe.record import Record
from skipjoin.report.plots import style

LOAD, RANGES = 1.2, (1, 32)
VARIANT = known(SYNCED)
# The paper has the shares of groups and requests with at least this many members (section 2.2).
SIZES = (2, 4, 12)


def measure(options: Options) -> Result:
    systems = {
        (name, width): system(VARIANT, trace, length_range=width) for name, trace in TRACES.items() for width in RANGES
    }
    asked = [
        ({"lengths": name, "length_range": width}, cell)
        for (name, width), of in systems.items()
        for cell in loaded(of, TRACES[name], [LOAD], options)
    ]
    records = watched(asked, options)
    columns = ("lengths", "length_range", "groups", "mean size", "largest")
    columns += tuple(f"{what} of {size} or more" for what in ("groups", "requests in groups") for size in SIZES)
    return {
        "settings": said(list(systems.values()), options, note="Lengths are known."),
        "tables": [table("Groups", columns, list(map(_row, records)))],
        "records": records,
    }


def _sizes(record: Record) -> dict[int, int]:
    """Return the number of groups by size."""
    return {int(size): number for size, number in record["watch"]["group_sizes"].items()}


def _row(record: Record) -> Sequence[object]:
    sizes = _sizes(record)
    groups, members = sum(sizes.values()), sum(size * number for size, number in sizes.items())
    large = [sum(number for size, number in sizes.items() if size >= least) / groups for least in SIZES]
    inside = [sum(size * number for size, number in sizes.items() if size >= least) / members for least in SIZES]
    return (record["lengths"], record["length_range"], groups, members / groups, max(sizes), *large, *inside)


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.6)
    for axes, width in zip(figure.subplots(1, len(RANGES), sharey=True), RANGES, strict=True):
        for number, record in enumerate(pick(result["records"], length_range=width)):
            sizes = _sizes(record)
            shares = [reached / sum(sizes.values()) for reached in accumulate(sizes.values())]
            look = style.look(number)
            axes.step(list(sizes), shares, where="post", color=look.color, linestyle=look.dash, label=record["lengths"])
        axes.set(title=f"length_range {width}", xlabel="requests in a group", xscale="log", ylim=(0, 1.02))
    figure.axes[0].set_ylabel("share of groups")
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"groups.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("length_range", "watch.group_sizes"))
