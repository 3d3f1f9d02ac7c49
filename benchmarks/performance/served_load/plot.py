"""Draw the README's chart: P95 normalized latency against load, from result.json.

It plots what `run.py` measured and computes nothing itself.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from skipjoin.report.plots import style

HERE = Path(__file__).parent
CHART = HERE.parents[2] / "docs" / "figures" / "served-load.svg"
# In the order of the legend.
LABELS = {
    "vllm": "vLLM, first come first served",
    "fcfs": "Skipjoin, fcfs",
    "fastserve": "Skipjoin, fastserve",
}


def draw(result: dict[str, Any], out: Path) -> None:
    """Write the chart. Every point is the mean over the seeds that were measured at its rate."""
    with style.styled():
        figure = style.new_figure(style.WIDE_IN, 3.4)
        axes = figure.add_subplot()
        for index, (name, label) in enumerate(LABELS.items()):
            rows = sorted(result["rows"][name], key=lambda row: row["rate_rps"])
            points = {
                rate: fmean(1000 * row["normalized_latency_s"]["p95"] for row in group)
                for rate, group in groupby(rows, key=lambda row: row["rate_rps"])
            }
            shape = style.look((1, 0, 2)[index])
            axes.plot(
                list(points),
                list(points.values()),
                label=label,
                color=shape.color,
                marker=shape.marker,
                linestyle=shape.dash,
            )
        axes.set(xlabel="load (requests/s)", ylabel="P95 normalized latency (ms/token)")
        axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        style.legend(figure, handles, labels)
        figure.set_facecolor("white")
        style.save(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CHART)
    args = parser.parse_args()
    draw(json.loads((HERE / "result.json").read_text()), args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
