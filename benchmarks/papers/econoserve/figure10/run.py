"""EconoServe figure 10: attainment of the objectives in the runs of figure 9.

The objective of a request is twice its time at light load. Figures are means over the loads that all variants share;
`orca` runs at lower ones.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import MACHINES, TRACES, of_figure09
from papers.figures.pictures import bars, look
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, mean, pick
from skipjoin.observe.record import Record
from skipjoin.report.plots import style

FIELDS = {"attainment": "slo.jct_attained", "goodput req/s": "slo.goodput_rps", "JCT s": "jct_s.mean"}


def measure(options: Options) -> Result:
    settings, records = of_figure09(options, "slo", "jct_s")
    alike = [record for record in records if record["variant"] != "orca"]
    return {
        "settings": settings,
        "tables": [
            compared("Means over loads", alike, ("model", "lengths", "variant"), FIELDS),
            compared("By load, means over traces", alike, ("model", "load", "variant"), FIELDS),
            compared("orca, at its own loads", pick(records, variant="orca"), ("model", "lengths", "load"), FIELDS),
        ],
        "records": records,
    }


def names_of(records: Sequence[Record]) -> list[str]:
    """Return the variants except `orca` in their order."""
    return list(dict.fromkeys(record["variant"] for record in records if record["variant"] != "orca"))


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.6)
    records, names = result["records"], names_of(result["records"])
    for axes, model in zip(figure.subplots(1, len(MACHINES), sharey=True), MACHINES, strict=True):
        series = {
            name: [
                mean(pick(records, model=model, lengths=lengths, variant=name), "slo.jct_attained")
                for lengths in TRACES
            ]
            for name in names
        }
        bars(axes, list(TRACES), series, {name: look(name).color for name in names})
        axes.set(title=model, ylim=(0, 1.05))
    figure.axes[0].set_ylabel("attainment, mean over loads")
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"attainment.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("slo.jct_attained",))
