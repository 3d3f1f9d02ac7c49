"""EconoServe figure 13: ablation, and other forecasts.

Separate queues (`-d`), groups (`-sd`), order by objectives (`-sdo`), nested reservations (`econoserve`), and the last
with another choice of nested requests and with other forecasts; OPT-13B on three traces, the larger models on ShareGPT,
at 1.2 times the capacity of `fcfs`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import (
    ABLATIONS,
    DEFAULTS,
    MACHINES,
    ORACLE,
    PRIOR,
    SHAREGPT,
    TRACES,
    loaded,
    records_of,
    said,
    system,
    variants,
)
from papers.figures.pictures import bars, look
from papers.figures.report import compared, main
from papers.figures.runs import Options, Result, grid, mean, pick, run_plans
from papers.figures.variants import Variant, plain
from skipjoin.report.plots import style

LOAD, SEEDS = 1.2, 2
REGRESSED = Variant("econoserve, regress:0.6", "econoserve", "regress:0.6")
VARIANTS = (*ABLATIONS, *variants("econoserve-largest"), DEFAULTS, ORACLE, REGRESSED, PRIOR, *plain("fcfs"))
CASES = [("opt-13b", trace) for trace in TRACES.values()]
CASES += [(model, SHAREGPT) for model in MACHINES if model != "opt-13b"]
FIELDS = {
    "JCT s": "jct_s.mean",
    "TBT s": "tpot_s.mean",
    "P95 TBT s": "tpot_s.p95",
    "s/token": "normalized_latency_s.mean",
    "attainment": "slo.jct_attained",
    "goodput req/s": "slo.goodput_rps",
    "req/s": "throughput_rps",
    "KV used": "kv.used_mean",
    "KV allocated": "kv.allocated_mean",
}


def measure(options: Options) -> Result:
    systems = {
        (model, trace.lengths, variant.name): system(variant, trace, MACHINES[model])
        for model, trace in CASES
        for variant in VARIANTS
    }
    plans = {key: grid(loaded(of, TRACES[key[1]], [LOAD], options, seeds=SEEDS)) for key, of in systems.items()}
    run_plans("figure13", list(plans.values()), options)
    records = records_of(plans, "model", "lengths", "variant")
    return {
        "settings": said(list(systems.values()), options, seeds=SEEDS),
        "tables": [compared("By variant", records, ("model", "lengths", "variant"), FIELDS)],
        "records": records,
    }


def draw(result: Result) -> Mapping[str, Figure]:
    shown = {"JCT to that of econoserve": "jct_s.mean", "attainment": "slo.jct_attained", "req/s": "throughput_rps"}
    names = [variant.name for variant in ABLATIONS]
    figure = style.new_figure(style.WIDE_IN, 2.6)
    for axes, (label, field) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        found = {
            name: [mean(pick(result["records"], model="opt-13b", lengths=one, variant=name), field) for one in TRACES]
            for name in names
        }
        last = found[names[-1]] if field != "slo.jct_attained" else [1.0] * len(TRACES)
        series = {name: [one / other for one, other in zip(some, last, strict=True)] for name, some in found.items()}
        bars(axes, list(TRACES), series, {name: look(name).color for name in names})
        axes.set_title(label if field != "throughput_rps" else "throughput to that of econoserve")
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"ablation.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("jct_s.mean", "slo.jct_attained", "slo.jct_scale", "throughput_rps"))
