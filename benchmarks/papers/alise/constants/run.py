"""Constants of ALISE, chosen on traces that its evaluation does not use.

`length_quantile` needs distributions of lengths: forecasts are those of recent requests alone (`prior`). `aging_s` is
tried with forecasts of two accuracies, in multiples of the time that 512 prompt and 256 output tokens take alone, which
follows from profiled step times. Both are chosen on lengths of LMSYS-Chat-1M and of Azure's conversations above the
capacity of OPT-13B on an A100, and then compared with the defaults on ShareGPT and Alpaca.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.alise import parts
from papers.alise.setting import A100, alise
from papers.figures.report import main, settings_of, table
from papers.figures.runs import Kept, Options, Result, cells, grid, mean, poisson, run_plans
from papers.figures.variants import Variant, lasting
from skipjoin.options import Value
from skipjoin.policies.execution import ExecutionTime
from skipjoin.report.plots import style
from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.traces import read_trace
from skipjoin.workload.workload import Replay, Workload

# Files and rates for the choice, 1.3 times the capacities of 5.6 and 1.3 requests per second.
CHOICE = {"lmsys_chat_1m_first_turn.csv": 7.3, "azure2023_conv.csv": 1.7}
# Lengths, rates and multiples of 300 s for the comparison.
COMPARED = {"sharegpt": (4.5, 1.0), "alpaca": (90.0, 0.2)}
QUANTILES: tuple[Value, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
MULTIPLES = (0.0, 100.0, 50.0, 25.0, 12.0, 6.0)
# The smallest aging that costs at most this factor of the time per token without aging.
MAX_COST = 1.5
DEFAULTS: dict[str, Value] = {"length_quantile": 0.3, "aging_s": 200.0}
FIELDS = ("normalized_latency_s.mean", "jct_s.p99", "longest_jct_s")


def typical_s() -> float:
    """Return the seconds that 512 prompt tokens and 256 output tokens take alone."""
    time = ExecutionTime(alise("prior").on(A100).settings.cost)
    return time.prefill(512) + 256 * time.decode(512)


def choosing() -> dict[str, tuple[Workload, float]]:
    arrivals = parse_arrivals("poisson")
    return {name: (Replay(read_trace(parts.folder() / name), arrivals=arrivals), rate) for name, rate in CHOICE.items()}


def tried(typical: float) -> dict[str, list[tuple[str, Variant]]]:
    quantiles: list[Mapping[str, Value]] = [{"length_quantile": one} for one in QUANTILES]
    agings: list[Mapping[str, Value]] = [{"aging_s": round(typical * one, 1)} for one in MULTIPLES]
    return {
        "length_quantile": _variants("prior", [*quantiles, {"length": "mean"}]),
        "aging_s, noise:0.2": _variants("noise:0.2", agings),
        "aging_s, regress:0.6": _variants("regress:0.6", agings),
    }


def _variants(predictor: str, params: Sequence[Mapping[str, Value]]) -> list[tuple[str, Variant]]:
    of = alise(predictor)
    return [(str(next(iter(one.values()))), replace(of, params=one)) for one in params]


def measure(options: Options) -> Result:
    typical, workloads = typical_s(), choosing()
    plans: dict[tuple[str, str, str], Kept] = {
        (constant, value, name): grid(
            cells(variant.on(A100), of, [rate], lasting(options, 1.0), seeds=options.seeds(1))
        )
        for constant, values in tried(typical).items()
        for value, variant in values
        for name, (of, rate) in workloads.items()
    }
    run_plans("constants", list(plans.values()), options)
    rows = {
        constant: [(value, *_figures(plans, constant, value, list(workloads))) for value, _ in values]
        for constant, values in tried(typical).items()
    }
    chosen = _chosen(rows)
    compared = _compared(chosen, options)
    systems = [alise("prior").on(A100)]
    settings = settings_of(systems, [], options, seeds=1)
    columns = ("value", "s/token, geometric mean", *(f"{name} {field}" for name in workloads for field in FIELDS))
    return {
        "settings": settings | {"lengths": [*CHOICE, *COMPARED], "arrivals": ["poisson"]},
        "typical_s": round(typical, 3),
        "chosen": chosen,
        "tables": [*(table(constant, columns, mine) for constant, mine in rows.items()), compared],
    }


def _figures(
    plans: Mapping[tuple[str, str, str], Kept], constant: str, value: str, names: Sequence[str]
) -> tuple[float, ...]:
    found = [[mean(plans[constant, value, name].records, field) for field in FIELDS] for name in names]
    return geometric_mean([one[0] for one in found]), *(number for one in found for number in one)


def _chosen(rows: Mapping[str, Sequence[Sequence[object]]]) -> dict[str, str]:
    """Return the quantile with the least time per token, and the strongest aging that costs at most `MAX_COST`."""
    best = min(rows["length_quantile"], key=_cost)
    mine = {name: rows[name] for name in rows if name.startswith("aging_s")}
    cheap = [
        value
        for place, (value, *_) in enumerate(next(iter(mine.values())))
        if all(_cost(found[place]) <= MAX_COST * _cost(found[0]) for found in mine.values())
    ]
    return {"length_quantile": str(best[0]), "aging_s": str(cheap[-1])}


def _cost(row: Sequence[object]) -> float:
    assert isinstance(row[1], float)
    return row[1]


def _compared(chosen: Mapping[str, str], options: Options) -> Result:
    quantile: dict[str, Value] = (
        {"length": "mean"}
        if chosen["length_quantile"] == "mean"
        else {"length_quantile": float(chosen["length_quantile"])}
    )
    after = quantile | {"aging_s": float(chosen["aging_s"])}
    plans = {
        (lengths, predictor, name): grid(
            cells(
                replace(alise(predictor), params=params).on(A100),
                poisson(lengths),
                [rate],
                lasting(options, times),
                seeds=options.seeds(1),
            )
        )
        for lengths, (rate, times) in COMPARED.items()
        for predictor in ("prior", "noise:0.2", "regress:0.6")
        for name, params in (("before", DEFAULTS), ("after", after))
    }
    run_plans("constants, compared", list(plans.values()), options)
    rows = [(*key, *(mean(plan.records, field) for field in FIELDS)) for key, plan in plans.items()]
    return table("Before and after", ("lengths", "forecasts", "constants", *FIELDS), rows)


def draw(result: Result) -> Mapping[str, Figure]:
    figure = style.new_figure(style.WIDE_IN, 2.6)
    shown = result["tables"][:-1]
    for axes, one in zip(figure.subplots(1, len(shown)), shown, strict=True):
        axes.plot([row[0] for row in one["rows"]], [row[1] for row in one["rows"]], "o-")
        axes.set(xlabel=one["title"], ylim=(0, None))
        axes.tick_params(axis="x", rotation=60, labelsize=6)
    return {"constants.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw)
