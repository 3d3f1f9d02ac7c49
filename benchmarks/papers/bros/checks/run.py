"""Check the targets of BROS at 8 real-time requests per second of ShareGPT."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import (
    BATCHED,
    BROS,
    COMPARED,
    FIELDS,
    KEPT,
    LATENCY,
    PAPER_TIMES,
    SHAREGPT,
    SWAP,
    TTFT_KEPT,
    changes,
    records_of,
    said,
    system,
    value_of,
    window,
)
from papers.figures.pictures import bars, look
from papers.figures.report import compared, main, table
from papers.figures.runs import Options, Result, grid, mean, pick, run_plans
from skipjoin.observe.record import Record
from skipjoin.report.plots import style

MODEL, RATE, SEEDS, LONG_SEEDS = "opt-13b", 8.0, 5, 3
MIN_TTFT_KEPT = 0.95
MOVED = {
    "GB to CPU memory": lambda record: record["kv"]["swapped_out_bytes"] / 1e9,
    "slots saved": "kv.checkpointed_slots",
    "shared blocks": "kv.shared_blocks_mean",
    "recomputed tokens": "kv.recomputed_tokens",
}


def measure(options: Options) -> Result:
    short, long = window(options), window(options, PAPER_TIMES)
    systems = {variant.name: system(variant, MODEL) for variant in COMPARED}
    plans = {
        (MODEL, "sharegpt", name, variant.name): grid(
            SHAREGPT.cells(variant, systems[variant.name], [RATE], extent, seeds=seeds)
        )
        for name, extent, seeds in (
            (f"{short.duration_s:g} s", short, SEEDS),
            (f"{long.duration_s:g} s", long, LONG_SEEDS),
        )
        for variant in COMPARED
    }
    run_plans("checks", list(plans.values()), options)
    records = records_of(plans, "model", "lengths", "lasting", "variant")
    return {
        "settings": said(list(systems.values()), [SHAREGPT], short, seeds=SEEDS),
        "tables": [checks(records), compared("All of it", records, ("lasting", "variant"), {**FIELDS, **MOVED})],
        "records": records,
    }


def checks(records: Sequence[Record]) -> Result:
    """Return changes from class-blind `fcfs` with their range over seeds, and the outcome of the check."""
    rows = []
    for lasting in dict.fromkeys(record["lasting"] for record in records):
        some = pick(records, lasting=lasting)
        for variant in COMPARED[1:]:
            kept = [value_of(record, TTFT_KEPT) for record in pick(some, variant=variant.name)]
            found = [_range(changes(some, variant.name, field)) for field in (LATENCY, BATCHED)]
            ends = (f"{value:.3f}" for value in (fmean(kept), min(kept)))
            rows.append((lasting, variant.name, *found, *ends, _verdict(variant.name, kept)))
    columns = ("real-time latency, %", "best effort, %", "TTFT kept", "least", f"at least {MIN_TTFT_KEPT:g}")
    return table("Against class-blind fcfs: mean (least to most over seeds)", ("lasting", "variant", *columns), rows)


def _verdict(name: str, kept: Sequence[float]) -> str:
    """Return whether the check holds with every seed, or "-" for variants without a target."""
    if name not in (SWAP.name, BROS.name):
        return "-"
    return "yes" if min(kept) >= MIN_TTFT_KEPT else "no"


def _range(values: Sequence[float]) -> str:
    mean, *ends = (f"{100 * value:+.1f}" for value in (fmean(values), min(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({ends[0]} to {ends[1]})"


def draw(result: Result) -> Mapping[str, Figure]:
    shown = {
        "latency (s/token)": LATENCY,
        "TTFT within 0.4 s": TTFT_KEPT,
        "best effort (req/s)": BATCHED,
    }
    records = pick(result["records"], lasting=result["records"][0]["lasting"])
    names = [variant.name for variant in COMPARED]
    figure = style.new_figure(style.WIDE_IN, 2.4)
    for axes, (label, field) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        series = {name: [mean(pick(records, variant=name), field)] for name in names}
        bars(axes, [""], series, {name: look(name).color for name in names})
        axes.set_title(label)
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"checks.png": figure}


if __name__ == "__main__":
    result = main(__file__, __doc__, measure, draw, keeps=(*KEPT, LATENCY, BATCHED, TTFT_KEPT))
    sys.exit(any(row[-1] == "no" for row in result["tables"][0]["rows"]))
