"""Grid of mean normalized latency of `fcfs` relative to `fastserve` by load, batch cap, KV and output spread."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from papers.fastserve.setting import system
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Options, Result, capacities, cells, grid, mean, run_plans, with_kv_gib
from papers.figures.shapes import Spread, workload
from skipjoin.report.plots import style

LOADS, CAPS, KV_GIB, CVS = (0.6, 0.9, 1.2, 2.0), (8, 16, 64, 256), (6.0, 11.0, 22.0), (0.0, 0.5, 1.0, 2.0)
RECIPES = ("fcfs", "fastserve")
PROMPT, OUTPUT, ENDS = 128, 128.0, (8, 1800)
# Ratios closer to 1 than this are ties, because seeds differ by as much.
TIE = 1.05
# Ratio at the ends of the color scale.
STRONGEST = 8.0


def measure(options: Options) -> Result:
    kvs, caps, cvs, loads = (options.some(values) for values in (KV_GIB, CAPS, CVS, LOADS))
    drawn = {cv: workload(Spread(f"{PROMPT} in, {OUTPUT:g} out, CV {cv:g}", PROMPT, OUTPUT, cv, *ENDS)) for cv in cvs}
    systems = {
        (kv, cap, recipe): with_kv_gib(system(recipe, batch_cap=int(cap)), kv)
        for kv in kvs
        for cap in caps
        for recipe in RECIPES
    }
    places = [(kv, cap, cv) for kv in kvs for cap in caps for cv in cvs]
    most = capacities("regions", [(systems[kv, cap, "fcfs"], drawn[cv]) for kv, cap, cv in places], options)
    plans = {
        (kv, cap, cv, load, recipe): grid(
            cells(systems[kv, cap, recipe], drawn[cv], [load * rate], options, seeds=options.seeds(1))
        )
        for (kv, cap, cv), rate in zip(places, most, strict=True)
        for load in loads
        for recipe in RECIPES
    }
    run_plans("regions", list(plans.values()), options)
    rows = []
    for (kv, cap, cv), rate in zip(places, most, strict=True):
        for load in loads:
            both = [plans[kv, cap, cv, load, recipe].records for recipe in RECIPES]
            fcfs, fastserve = (mean(records, "normalized_latency_s.mean") for records in both)
            tails = [mean(records, "normalized_latency_s.p95") for records in both]
            rows.append((kv, cap, cv, load, load * rate, fcfs, fastserve, fcfs / fastserve, tails[0] / tails[1]))
    columns = ("KV GiB", "cap", "CV", "load", "req/s", "fcfs s/token", "fastserve s/token", "ratio", "ratio of P95")
    return {
        "settings": settings_of(list(systems.values()), list(drawn.values()), options, seeds=1),
        "tables": [summary(rows), table("Mean normalized latency, fcfs to fastserve", columns, rows)],
    }


def summary(rows: Sequence[Sequence[float]]) -> Result:
    """Return wins, ties and losses by coefficient of variation and by load above or below 1."""
    lines = []
    for cv in sorted({row[2] for row in rows}):
        for over in (False, True):
            ratios = [row[7] for row in rows if row[2] == cv and (row[3] > 1) == over]
            won, lost = sum(ratio > TIE for ratio in ratios), sum(ratio < 1 / TIE for ratio in ratios)
            ties = len(ratios) - won - lost
            lines.append((cv, "above 1" if over else "below 1", won, ties, lost, min(ratios), max(ratios)))
    columns = ("output CV", "load", "faster", "tie", "slower", "least ratio", "greatest ratio")
    return table("fastserve against fcfs, by cells of the grid", columns, lines)


def draw(result: Result) -> Mapping[str, Figure]:
    rows = {tuple(row[:4]): row[7] for row in result["tables"][1]["rows"]}
    kvs, caps, cvs, loads = (sorted({key[place] for key in rows}) for place in range(4))
    colors = LinearSegmentedColormap.from_list("faster", [style.VERMILION, "#FFFFFF", style.BLUE])
    norm = LogNorm(1 / STRONGEST, STRONGEST)
    figure = style.new_figure(style.WIDE_IN, 5.6)
    panels = figure.subplots(len(kvs), len(caps), sharex=True, sharey=True, squeeze=False)
    for kv, line in zip(kvs, panels, strict=True):
        for cap, axes in zip(caps, line, strict=True):
            _map(axes, [[rows[kv, cap, cv, load] for load in loads] for cv in cvs], colors, norm)
            axes.set_title(f"cap {cap}, KV {kv:g} GiB", fontsize=8)
            axes.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
            axes.set_yticks(range(len(cvs)), [f"{cv:g}" for cv in cvs])
            axes.grid(visible=False)
    figure.supxlabel("load (arrival rate / capacity of fcfs)", fontsize=9)
    figure.supylabel("coefficient of variation of output lengths", fontsize=9)
    figure.suptitle("mean normalized latency, fcfs / fastserve: blue where fastserve is faster", fontsize=9)
    return {"regions.png": figure}


def _map(axes: Axes, values: list[list[float]], colors: LinearSegmentedColormap, norm: LogNorm) -> None:
    """Draw a heat map with the ratio in each cell; ties are gray."""
    for row, line in enumerate(values):
        for column, ratio in enumerate(line):
            tie = 1 / TIE <= ratio <= TIE
            color = "#CCCCCC" if tie else colors(norm(min(STRONGEST, max(1 / STRONGEST, ratio))))
            axes.fill_between([column - 0.5, column + 0.5], row - 0.5, row + 0.5, color=color, lw=0)
            axes.annotate(
                f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}", (column, row), ha="center", va="center", fontsize=6
            )
    axes.set(xlim=(-0.5, len(values[0]) - 0.5), ylim=(-0.5, len(values) - 0.5))


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, docs={"regions.png": "fastserve-regions.png"})
