"""Forecasts learned from prompts during the run: latency by rate, and accuracy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.alise import parts
from papers.alise.setting import A100, KEPT, alise
from papers.figures.pictures import curves, legend_of
from papers.figures.report import latencies, main, settings_of, table
from papers.figures.runs import Kept, Options, Result, cells, grid, pick, run_plans
from papers.figures.variants import Variant, lasting, named, plain
from skipjoin.report.plots import style
from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.traces import read_trace
from skipjoin.workload.workload import Replay

# ALISE's own forecaster retrieves the lengths of similar prompts (section 3.1).
RETRIEVAL = Variant("alise retrieval", "alise", "alise")
FORECAST = (alise("prior"), RETRIEVAL, alise("learned"))
VARIANTS = (*plain("fcfs", "fastserve"), *FORECAST, *plain("alise-oracle"))
# Rates around the capacity, and durations in multiples of 300 s.
RATES = {"alpaca_vicuna7b_lengths": (28.0, 36.0), "alpaca_text": (66.0, 82.0), "sharegpt_text": (1.8, 2.6)}
LASTING = {"alpaca_vicuna7b_lengths": 0.8, "alpaca_text": 0.4, "sharegpt_text": 3.0}
QUALITY = ("r_log", "mae", "within_25", "coverage_80")


def workload(name: str) -> Replay:
    """Return the requests of a trace with Poisson arrivals."""
    return Replay(read_trace(parts.folder() / f"{name}.jsonl.gz"), arrivals=parse_arrivals("poisson"))


def measure(options: Options) -> Result:
    plans = [pair for name in RATES for pair in curves_of(name, options)]
    run_plans("texts", [plan for _, plan in plans], options)
    records = named(plans)
    durations = "; ".join(f"{name} {times * options.duration_s:g} s" for name, times in LASTING.items())
    settings = settings_of(
        [variant.on(A100) for variant in VARIANTS], [], options, seeds=1, note=f"Durations: {durations}."
    )
    return {
        "settings": settings | {"lengths": list(RATES), "arrivals": ["poisson"]},
        "tables": [
            _quality(records),
            *(
                latencies(name, of_trace(records, name), [variant.name for variant in VARIANTS], by="variant")
                for name in RATES
            ),
        ],
        "records": records,
    }


def curves_of(name: str, options: Options) -> list[tuple[str, Kept]]:
    of, extent, rates = workload(name), lasting(options, LASTING[name]), options.some(RATES[name])
    if max(rates) * extent.duration_s > len(of.trace.rows):
        sys.exit(
            f"texts: {name} has {len(of.trace.rows)} rows, too few for {max(rates) * extent.duration_s:.0f} requests"
        )
    return [(variant.name, grid(cells(variant.on(A100), of, rates, extent, seeds=[0]))) for variant in VARIANTS]


def of_trace(records: list[Result], name: str) -> list[Result]:
    return pick(records, lengths=f"trace:{name}.jsonl.gz")


def _quality(records: list[Result]) -> Result:
    """Return the accuracy of the forecasts at the highest rate."""
    rows = []
    for name in RATES:
        mine = of_trace(records, name)
        highest = max(record["workload"]["rate_rps"] for record in mine)
        for variant in FORECAST:
            (record,) = pick(mine, variant=variant.name, rate_rps=highest)
            rows.append(
                (name, variant.name, record["requests"]["finished"], *(record["prediction"][key] for key in QUALITY))
            )
    return table(
        "Forecasts: correlation of logarithms, mean error in tokens, share within 25 %, share in the 80 % interval",
        ("trace", "variant", "requests", *QUALITY),
        rows,
    )


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.8)
    panels = figure.subplots(1, len(RATES))
    for axes, name in zip(panels, RATES, strict=True):
        mine = of_trace(result["records"], name)
        curves(axes, mine, [variant.name for variant in VARIANTS], "normalized_latency_s.mean", by="variant")
        axes.set(title=name.removesuffix("_lengths"), xlabel="arrival rate (req/s)", yscale="log")
    panels[0].set_ylabel(style.field_label("normalized_latency_s.mean"))
    legend_of(figure, panels[0])
    return {"latency.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, "normalized_latency_s.mean"))
