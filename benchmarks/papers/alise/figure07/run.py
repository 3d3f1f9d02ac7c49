"""ALISE figure 7: distributions of input and output lengths of Alpaca and ShareGPT."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from statistics import fmean, pstdev, quantiles

from matplotlib.figure import Figure

from papers.figures.pictures import legend_of
from papers.figures.report import main, table
from papers.figures.runs import Options, Result, poisson
from skipjoin.report.plots import style

DATASETS, REQUESTS = ("alpaca", "sharegpt"), 20_000
# Bars per panel, up to the 99th percentile.
BARS = 40


def drawn(dataset: str) -> dict[str, list[int]]:
    jobs = poisson(dataset).draw(1.0, None, 0, REQUESTS)
    return {"input": [job.prompt_tokens for job in jobs], "output": [job.output_tokens for job in jobs]}


def measure(options: Options) -> Result:
    rows, shares = [], {}
    for dataset in DATASETS:
        for side, lengths in drawn(dataset).items():
            cuts = quantiles(lengths, n=100)
            rows.append((dataset, side, fmean(lengths), pstdev(lengths), cuts[49], cuts[94], cuts[98]))
            shares[f"{dataset}, {side}"] = _histogram(lengths, cuts[98])
    columns = ("dataset", "side", "mean", "deviation", "P50", "P95", "P99")
    return {
        "settings": {"case": f"{REQUESTS:,} requests drawn from the built-in tables of quantiles, seed 0"},
        "tables": [table("Lengths in tokens", columns, rows)],
        "histograms": shares,
    }


def _histogram(lengths: list[int], longest: float) -> dict[str, list[float]]:
    """Return the left edges and shares of BARS bars up to `longest`."""
    width = longest / BARS
    counts = [0] * BARS
    for length in lengths:
        if length < longest:
            counts[int(length / width)] += 1
    return {
        "left": [round(number * width, 1) for number in range(BARS)],
        "share": [round(count / len(lengths), 5) for count in counts],
    }


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.8)
    panels = figure.subplots(1, 2)
    for axes, dataset in zip(panels, DATASETS, strict=True):
        for side, color in (("input", style.SKY), ("output", style.VERMILION)):
            bars = result["histograms"][f"{dataset}, {side}"]
            axes.step(bars["left"], bars["share"], where="post", color=color, label=side)
        axes.set(title=dataset, xlabel="tokens", ylabel="share of requests", ylim=(0, None))
    legend_of(figure, panels[0])
    return {"lengths.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
