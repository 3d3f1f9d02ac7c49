"""ALISE figure 9: latency of 200 consecutive requests under `fcfs` and `alise`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from statistics import fmean

from matplotlib.figure import Figure

from papers.alise.setting import A100, NEAR_TRUE, REGRESSED, V100
from papers.figures.pictures import legend_of, look
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Options, Result, cells, poisson
from papers.figures.variants import lasting, plain
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell
from skipjoin.sim.experiments.simulation import run

VARIANTS = (*plain("fcfs", "fastserve"), NEAR_TRUE, REGRESSED[1])
CASES = {"V100, 2 req/s": (V100["opt-13b"], 2.0), "V100, 1 req/s": (V100["opt-13b"], 1.0), "A100, 2 req/s": (A100, 2.0)}
SAMPLED = 200
COLUMNS = ("case", "variant", "mean latency s", "to fcfs", "by seed", "faster than with fcfs", "TTFT s", "P95 TTFT s")


def ended(cell: Cell) -> list[RequestFacts]:
    facts: list[RequestFacts] = []
    run(cell, on_events=RequestLog(facts.append).observe)
    return sorted(facts, key=lambda one: one.id)


def middle(facts: list[RequestFacts]) -> list[RequestFacts]:
    first = max(0, (len(facts) - SAMPLED) // 2)
    return facts[first : first + SAMPLED]


def measure(options: Options) -> Result:
    rows, latency = [], {}
    workload = poisson("sharegpt")
    for case, (machine, rate) in CASES.items():
        found = {}
        for variant in VARIANTS:
            seeds = cells(variant.on(machine), workload, [rate], lasting(options, 1.0))
            found[variant.name] = [middle(ended(cell)) for cell in seeds]
        rows += [(case, name, *_row(mine, found["fcfs"])) for name, mine in found.items()]
        latency[case] = {name: [round(one, 3) for one in _latencies(mine[0])] for name, mine in found.items()}
    systems = [variant.on(machine) for machine, _ in CASES.values() for variant in VARIANTS]
    return {
        "settings": settings_of(systems, [workload], options),
        "tables": [table("Latency of 200 consecutive requests (paper: 46 % less than with fcfs)", COLUMNS, rows)],
        "latency_s": latency,
    }


def _latencies(facts: list[RequestFacts]) -> list[float]:
    return [one.jct(0.0) for one in facts]


def _row(facts: list[list[RequestFacts]], fcfs: list[list[RequestFacts]]) -> tuple[object, ...]:
    mine, first = [_latencies(one) for one in facts], [_latencies(one) for one in fcfs]
    pairs = [pair for both in zip(mine, first, strict=True) for pair in zip(*both, strict=True)]
    mean, other = (fmean(side) for side in zip(*pairs, strict=True))
    by_seed = ", ".join(f"{fmean(one) / fmean(two):.2f}" for one, two in zip(mine, first, strict=True))
    ttft = sorted(one.ttft(0.0) for some in facts for one in some)
    faster = sum(one < two for one, two in pairs) / len(pairs)
    return mean, mean / other, by_seed, faster, fmean(ttft), ttft[int(0.95 * len(ttft))]


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.6)
    panels = figure.subplots(1, len(CASES))
    for axes, (case, found) in zip(panels, result["latency_s"].items(), strict=True):
        for name in ("fcfs", NEAR_TRUE.name):
            shape = look(name)
            axes.plot(found[name], ".", color=shape.color, ms=3, label=name)
            axes.axhline(fmean(found[name]), color=shape.color, linestyle=":", lw=1)
        axes.set(title=case, xlabel="request", ylim=(0, None))
    panels[0].set_ylabel("latency (s)")
    legend_of(figure, panels[0])
    return {"responses.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
