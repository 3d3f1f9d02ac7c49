"""BROS figure 12: real-time requests alone.

OPT-13B on two A100s and OPT-30B on four, ShareGPT. `fcfs` stands for vLLM; TGI is not compared. One rate also runs for
the paper's ten minutes, with three seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import (
    BROS,
    FCFS,
    KEPT,
    LATENCY,
    PAPER_TIMES,
    PLANS_IN_FLIGHT,
    TPOT_KEPT,
    TTFT_KEPT,
    Load,
    against_rate,
    records_of,
    said,
    shipped,
    system,
    window,
)
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, grid, pick, run_plans
from papers.figures.variants import plain

VARIANTS = shipped(FCFS, *plain("fastserve"), BROS)
RATES = (8.0, 12.0, 16.0)
MODELS, SEEDS, ALONE = ("opt-13b", "opt-30b"), 2, Load(in_flight=0)
# The cell at full length, above the capacity.
LONG_MODEL, LONG_RATE, LONG_SEEDS = "opt-13b", 14.0, 3
COLUMNS = {
    "s/token": LATENCY,
    "TTFT kept": TTFT_KEPT,
    "TPOT kept": TPOT_KEPT,
    "req/s while they arrive": "real_time.window.throughput_rps",
    "tokens/s while they arrive": "real_time.window.throughput_tps",
    "KV used": "kv.used_mean",
}


def measure(options: Options) -> Result:
    options, long = window(options), window(options, PAPER_TIMES)
    systems = {
        (model, variant.name): system(variant, model, depth=PLANS_IN_FLIGHT) for model in MODELS for variant in VARIANTS
    }
    plans = {
        (model, "sharegpt", variant.name): grid(
            ALONE.cells(variant, systems[model, variant.name], options.some(RATES), options, seeds=SEEDS)
        )
        for model in MODELS
        for variant in VARIANTS
    }
    long_plans = {
        (LONG_MODEL, "sharegpt", variant.name): grid(
            ALONE.cells(variant, systems[LONG_MODEL, variant.name], [LONG_RATE], long, seeds=LONG_SEEDS)
        )
        for variant in VARIANTS
    }
    run_plans("figure12", [*plans.values(), *long_plans.values()], options)
    records, long_records = (records_of(some, "model", "lengths", "variant") for some in (plans, long_plans))
    keys = ("model", "rate_rps", "variant")
    return {
        "settings": said(list(systems.values()), [ALONE], options, seeds=SEEDS),
        "tables": [
            compared("Real-time requests alone", records, keys, COLUMNS),
            compared(f"For {long.duration_s:g} s, {LONG_SEEDS} seeds", long_records, keys, COLUMNS),
        ],
        "records": records + long_records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    fields = {"latency (s/token)": LATENCY, "throughput (req/s)": "real_time.window.throughput_rps"}
    names = [variant.name for variant in VARIANTS]
    records = pick(result["records"], duration_s=result["settings"]["duration_s"])
    return {"alone.png": against_rate(records, fields, names)}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, LATENCY, "real_time.window.throughput_rps"))
