"""EconoServe figure 12: GPUs for the goodput of a split into prefill and decode replicas.

OPT-13B on A100s, ShareGPT, least-work dispatch. As in the paper: the goodput of four prefill and four decode GPUs, then
of four H100s and eight A100s, and the minimum number of A100s with which others reach 0.99 of it. Then the minimum that
each needs for an attainment of 0.9, including a split with one prefill replica.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import DEFAULTS, ECONOSERVE, OPT_13B, SHAREGPT, SLO, SPLIT, labelled, said, system
from papers.figures.pictures import look
from papers.figures.report import main, table
from papers.figures.runs import Kept, Options, Result, cells, grid, poisson, run_plans
from papers.figures.variants import Variant, lasting
from skipjoin.observe.record import Record
from skipjoin.report.bound import minimum_replicas, parse_bound
from skipjoin.report.plots import style
from skipjoin.sim.experiments.sweep import ReplicaSearch
from skipjoin.sim.experiments.system import System

# Multiples of the capacity of one GPU with `fcfs`, and the duration relative to the usual one.
LOADS, _TIMES = (2.0, 3.0, 4.0), 0.2
FCFS = Variant("fcfs", "fcfs")
NEAR, ATTAINED = 0.99, 0.9


def split(replicas: int, prefill_replicas: int, prefill_hardware: str | None = None) -> System:
    machine = replace(OPT_13B, prefill_hardware=prefill_hardware)
    return SPLIT.on(
        machine, replicas=replicas, prefill_replicas=prefill_replicas, network_gbps=100.0, dispatch="least-work"
    )


def whole(variant: Variant, replicas: int) -> System:
    return replace(system(variant, SHAREGPT), replicas=replicas, dispatch="least-work")


SPLITS = {"4 + 4 A100": split(8, 4), "4 H100 + 8 A100": split(12, 4, "h100-80gb")}
OTHERS = {variant.name: whole(variant, 3) for variant in (FCFS, ECONOSERVE, DEFAULTS)}


class Fewest(Kept):
    """Search for the minimum number of replicas with which a system keeps a bound at one rate."""

    def __init__(self, of: System, rate: float, bound: str, options: Options) -> None:
        self._bound = parse_bound(bound)
        found = cells(of, poisson("sharegpt"), [rate], lasting(options, _TIMES), seeds=[0], slo=SLO)
        super().__init__(ReplicaSearch(found, self._bound))

    @property
    def replicas(self) -> int | None:
        """The minimum number, or None if the bound holds at no number."""
        points: dict[int, list[Record]] = {}
        for record in self.records:
            points.setdefault(record["settings"]["replicas"], []).append(record)
        return minimum_replicas(points, self._bound)


def measure(options: Options) -> Result:
    rates = [load * SHAREGPT.capacity_rps["opt-13b"] for load in options.some(LOADS)]
    splits = {
        name: grid(cells(of, poisson("sharegpt"), rates, lasting(options, _TIMES), seeds=[0], slo=SLO))
        for name, of in SPLITS.items()
    }
    run_plans("figure12, splits", list(splits.values()), options)
    records = [one for name, plan in splits.items() for one in labelled(plan.records, variant=name)]
    goals = {(one["variant"], one["workload"]["rate_rps"]): one["slo"]["goodput_rps"] for one in records}
    same = {
        (*key, name): Fewest(of, key[1], f"slo.goodput_rps>={NEAR * goal:g}", options)
        for key, goal in goals.items()
        for name, of in OTHERS.items()
    }
    attaining = {
        (name, rate): Fewest(of, rate, f"slo.jct_attained>={ATTAINED}", options)
        for name, of in {"1 prefill replica and others": split(4, 1), **OTHERS}.items()
        for rate in rates
    }
    run_plans("figure12", [*same.values(), *attaining.values()], options)
    for key, search in [*same.items(), *attaining.items()]:
        records += labelled(search.records, variant=key[-1] if len(key) > 2 else key[0])
    return {
        "settings": said([*SPLITS.values(), *OTHERS.values()], lasting(options, _TIMES), note="Searches for replicas."),
        "tables": [_same(goals, same), _attaining(attaining, rates)],
        "records": records,
    }


def _same(goals: Mapping[tuple[str, float], float], same: Mapping[tuple[str, float, str], Fewest]) -> Result:
    rows = []
    for (name, rate), goal in goals.items():
        gpus = SPLITS[name].replicas
        found = [same[name, rate, other].replicas for other in OTHERS]
        less = [None if few is None else f"{100 * (1 - few / gpus):.0f}" for few in found]
        rows.append((name, rate, goal, gpus, *(value for pair in zip(found, less, strict=True) for value in pair)))
    columns = ("split", "req/s", "its goodput", "its GPUs", *(text for name in OTHERS for text in (name, "% fewer")))
    return table("GPUs for the goodput of a split (paper: 73 and 61 % fewer)", columns, rows)


def _attaining(found: Mapping[tuple[str, float], Fewest], rates: list[float]) -> Result:
    names = list(dict.fromkeys(name for name, _ in found))
    rows = [(rate, *(found[name, rate].replicas for name in names)) for rate in rates]
    return table(f"GPUs for an attainment of {ATTAINED:g}", ("req/s", *names), rows)


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.NARROW_IN, 2.8)
    axes = figure.add_subplot()
    columns, rows = result["tables"][1]["columns"], result["tables"][1]["rows"]
    for place, name in enumerate(columns[1:], 1):
        shape = look({"1 prefill replica and others": "split"}.get(name, name))
        axes.plot(
            [row[0] for row in rows], [row[place] for row in rows], color=shape.color, marker=shape.marker, label=name
        )
    axes.set(xlabel="arrival rate (req/s)", ylabel=f"GPUs for an attainment of {ATTAINED:g}", ylim=(0, None))
    style.legend(figure, *axes.get_legend_handles_labels())
    return {"gpus.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
