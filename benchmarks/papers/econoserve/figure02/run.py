"""EconoServe figure 2: size of the groups that start and finish together.

OPT-13B on one A100 with known lengths, at 1.2 and 2 times the capacity of `fcfs`, three seeds. SyncCoupled is the
paper's subject; `econoserve` admits continuously or, gated, by groups. Lengths in one range of 32 tokens are equal. A
group is synchronized if all of its members finish in one step.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import ECONOSERVE, TRACES, known, loaded, said, system, variants
from papers.econoserve.watch import watched
from papers.figures.report import main, table
from papers.figures.runs import Options, Result, mean, pick
from skipjoin.observe.record import Record
from skipjoin.report.plots import style

LOADS, SEEDS = (1.2, 2.0), 3
VARIANTS = (
    *map(known, variants("synccoupled")),
    known(ECONOSERVE),
    replace(known(ECONOSERVE), name="econoserve, gated", params={"admission": "gated"}),
)
# The paper has the shares of groups and requests with at least this many members (section 2.2).
SIZES = (2, 4, 12)


def measure(options: Options) -> Result:
    systems = {(name, one.name): system(one, trace) for name, trace in TRACES.items() for one in VARIANTS}
    asked = [
        ({"lengths": name, "variant": variant}, cell)
        for (name, variant), of in systems.items()
        for cell in loaded(of, TRACES[name], options.some(LOADS), options, seeds=SEEDS)
    ]
    records = watched(asked, options)
    columns = ("lengths", "load", "variant", "mean size", "largest")
    columns += tuple(f"{what} of {size} or more" for what in ("groups", "requests in groups") for size in SIZES)
    rows = [
        _row((name, load, variant.name), some)
        for name in TRACES
        for load in options.some(LOADS)
        for variant in VARIANTS
        if (some := pick(records, lengths=name, load=load, variant=variant.name))
    ]
    return {
        "settings": said(list(systems.values()), options, seeds=SEEDS, note="Lengths are known."),
        "tables": [table("Groups", (*columns, "synchronized", "JCT s", "attainment"), rows)],
        "records": records,
    }


def _sizes(records: Sequence[Record]) -> dict[int, int]:
    """Return the number of groups by size, over all seeds."""
    found = Counter[int]()
    for record in records:
        found.update({int(size): number for size, number in record["watch"]["group_sizes"].items()})
    return dict(sorted(found.items()))


def _row(labels: Sequence[object], records: Sequence[Record]) -> Sequence[object]:
    sizes = _sizes(records)
    groups, members = sum(sizes.values()), sum(size * number for size, number in sizes.items())
    large = [sum(number for size, number in sizes.items() if size >= least) / groups for least in SIZES]
    inside = [sum(size * number for size, number in sizes.items() if size >= least) / members for least in SIZES]
    together = [record["watch"]["synced"] for record in records if record["watch"]["synced"] is not None]
    served = (mean(records, "jct_s.mean"), mean(records, "slo.jct_attained"))
    return (*labels, members / groups, max(sizes), *large, *inside, fmean(together) if together else None, *served)


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.6)
    for axes, variant in zip(figure.subplots(1, len(VARIANTS), sharey=True), VARIANTS, strict=True):
        for number, name in enumerate(TRACES):
            sizes = _sizes(pick(result["records"], lengths=name, variant=variant.name, load=LOADS[-1]))
            shares = [reached / sum(sizes.values()) for reached in accumulate(sizes.values())]
            look = style.look(number)
            axes.step(list(sizes), shares, where="post", color=look.color, linestyle=look.dash, label=name)
        axes.set(title=variant.name, xlabel="requests in a group", xlim=(1, 15), ylim=(0, 1.02))
    figure.axes[0].set_ylabel("share of groups")
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"groups.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("load", "watch.group_sizes", "watch.synced"))
