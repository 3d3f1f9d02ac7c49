"""EconoServe's claims at full length: an hour of arrivals, three seeds.

OPT-13B with ShareGPT, the cells that the text quotes: figure 9 at the capacity of `fcfs`, figures 10 and 13 at 1.2
times that, and figure 12's first row, four prefill and four decode GPUs against four whole replicas.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.figure12.run import SPLITS, whole
from papers.econoserve.setting import (
    ABLATIONS,
    DEFAULTS,
    ECONOSERVE,
    SHAREGPT,
    SLO,
    labelled,
    loaded,
    records_of,
    said,
    system,
)
from papers.figures.pictures import bars
from papers.figures.report import main, table
from papers.figures.runs import Options, Result, cells, grid, mean, pick, poisson, run_plans
from papers.figures.variants import Variant
from skipjoin.observe.record import Record
from skipjoin.report.bound import field_value
from skipjoin.report.plots import style

# As long as the shortest of the paper's runs.
LASTING_S, SEEDS = 3600.0, 3
FCFS, UNNESTED = Variant("fcfs", "fcfs"), ABLATIONS[2]
# Requests never become overdue, which precede all others.
NEVER_OVERDUE = replace(ECONOSERVE, name="econoserve, never overdue", params={"overdue_s": 1e8})
# By load: a cell of figure 9, and of figures 10 and 13.
CELLS = {1.0: (FCFS, ECONOSERVE), 1.2: (FCFS, UNNESTED, ECONOSERVE, NEVER_OVERDUE, DEFAULTS)}
# Each step of each replica is simulated, which takes ten times as long as the others.
GPUS_LASTING_S, GPUS_RATE, GPUS = 600.0, 7.4, 4
ATTAINMENT = "slo.jct_attained"
FIELDS = {
    "JCT s": "jct_s.mean",
    "s/token": "normalized_latency_s.mean",
    "goodput req/s": "slo.goodput_rps",
    "tokens/s": "throughput_tps",
}


def measure(options: Options) -> Result:
    hour = replace(options, lasting_s=options.lasting_s or LASTING_S)
    own = {(load, variant.name): system(variant, SHAREGPT) for load, some in CELLS.items() for variant in some}
    plans = {key: grid(loaded(of, SHAREGPT, [key[0]], hour, seeds=SEEDS)) for key, of in own.items()}
    shorter = replace(options, duration_s=options.lasting_s or GPUS_LASTING_S)
    systems = {"split": SPLITS["4 + 4 A100"]}
    systems |= {f"{variant.name}, cluster": whole(variant, GPUS) for variant in (FCFS, ECONOSERVE, DEFAULTS)}
    clusters = {
        name: grid(cells(of, poisson("sharegpt"), [GPUS_RATE], shorter, seeds=options.seeds(SEEDS), slo=SLO))
        for name, of in systems.items()
    }
    run_plans("headline", [*plans.values(), *clusters.values()], options)
    records = records_of(plans, "load", "variant")
    of_clusters = [one for name, plan in clusters.items() for one in labelled(plan.records, variant=name)]
    note = f"Every run lasts {hour.lasting_s:g} s, clusters {shorter.duration_s:g} s."
    return {
        "settings": said([*own.values(), *systems.values()], hour, seeds=SEEDS, note=note),
        "tables": [
            _means(f"ShareGPT for {hour.lasting_s:g} s", records),
            _means(f"{GPUS} replicas and a split of 4 + 4", of_clusters),
        ],
        "records": records + of_clusters,
    }


def _means(title: str, records: Sequence[Record]) -> Result:
    """Return a table of means over seeds, and of the range of the attainment."""
    groups: dict[tuple[float, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["load"], record["variant"]), []).append(record)
    rows = [
        (
            *key,
            _spread([field_value(one, ATTAINMENT) for one in some]),
            *(mean(some, field) for field in FIELDS.values()),
        )
        for key, some in sorted(groups.items(), key=lambda item: item[0][0])
    ]
    return table(title, ("load", "variant", "attainment", *FIELDS), rows)


def _spread(values: Sequence[float]) -> str:
    average, least, most = (f"{value:.3g}" for value in (fmean(values), min(values), max(values)))
    return average if least == most else f"{average} ({least}-{most})"


def draw(result: Result) -> Mapping[str, Figure]:
    shown = {"attainment": ATTAINMENT, "tokens/s": "throughput_tps"}
    load = max(CELLS)
    names, records = [variant.name for variant in CELLS[load]], pick(result["records"], load=load)
    figure = style.new_figure(style.WIDE_IN, 2.6)
    for axes, (label, field) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        series = {name: [mean(pick(records, variant=name), field)] for name in names}
        bars(axes, [f"load {load:g}"], series, dict(zip(names, style.COLORS, strict=False)))
        axes.set_title(label)
    style.legend(figure, *figure.axes[0].get_legend_handles_labels())
    return {"headline.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=("load", ATTAINMENT, *FIELDS.values()))
