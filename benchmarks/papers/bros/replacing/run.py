"""Which real-time requests best-effort ones may postpone, with exact and with varying step times.

Llama-3-70B on eight A100s with ShareGPT, at a rate that leaves time and at one that does not. `all` is the paper's rule
(section 4.2), `decodes` the default. With noise, the logarithm of measured over modeled step times has this standard
deviation, and the recipe learns a margin from it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.bros.setting import (
    BATCHED,
    BROS,
    FIELDS,
    KEPT,
    NOISE,
    SHAREGPT,
    TTFT_KEPT,
    records_of,
    said,
    system,
    window,
)
from papers.figures.pictures import bars, look
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, grid, mean, pick, run_plans
from skipjoin.report.plots import style

MODEL, RATES, SEEDS = "llama-3-70b", (8.0, 12.0), 3
RULES = ("all", "decodes", "none")
NOISES = (0.0, NOISE)
TTFT, TPOT = "real_time.ttft_s.p50", "real_time.tpot_s.mean"


def measure(options: Options) -> Result:
    options = window(options)
    systems = {
        (f"{noise:g}", rule): replace(system(BROS, MODEL, replacing=rule), step_noise=noise)
        for noise in NOISES
        for rule in RULES
    }
    plans = {
        key: grid(SHAREGPT.cells(BROS, of, options.some(RATES), options, seeds=SEEDS)) for key, of in systems.items()
    }
    run_plans("replacing", list(plans.values()), options)
    records = records_of(plans, "noise", "replacing")
    return {
        "settings": said(list(systems.values()), [SHAREGPT], options, seeds=SEEDS),
        "tables": [
            compared(
                "Rules of replacing",
                records,
                ("noise", "rate_rps", "replacing"),
                {"TTFT P50 (s)": TTFT, "TPOT (s)": TPOT, **FIELDS},
            )
        ],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    shown = {"TTFT P50 (s)": TTFT, "time per token (s)": TPOT, "best effort (req/s)": BATCHED}
    records = [record for record in result["records"] if record["noise"] == "0"]
    rates = sorted({record["workload"]["rate_rps"] for record in records})
    colors = dict(zip(RULES, (look(name).color for name in ("bros-swap", "bros", "fcfs")), strict=True))
    figure = style.new_figure(style.WIDE_IN, 2.4)
    for axes, (label, field) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        series = {
            rule: [
                mean([one for one in pick(records, replacing=rule) if one["workload"]["rate_rps"] == rate], field)
                for rate in rates
            ]
            for rule in RULES
        }
        bars(axes, [f"{rate:g} req/s" for rate in rates], series, colors)
        axes.set_title(label)
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"replacing.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=(*KEPT, TTFT, TPOT, BATCHED, TTFT_KEPT))
