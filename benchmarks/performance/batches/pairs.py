"""Options, ratios and records of the benchmarks that compare runs in pairs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from served import QUANTILES, Figures

import harness
from skipjoin.observe.record import percentile


def arguments(
    about: str, *, pairs: int, seconds: float, recipes: Iterable[str], parts: Iterable[str]
) -> argparse.Namespace:
    """Parse the command line of a benchmark with these recipes and parts."""
    parser = harness.parser(about, pairs=pairs)
    parser.add_argument("--recipes", type=harness.some_of("recipes", recipes), default=list(recipes))
    parser.add_argument("--parts", type=harness.some_of("parts", parts), default=list(parts))
    parser.add_argument("--seconds", type=float, default=seconds, help="seconds of arrivals in a run")
    return parser.parse_args()


def compared(pairs: Sequence[dict[str, Figures]], base: str, other: str) -> Figures:
    """Return the times to the first token of chat in pairs of runs.

    Ratios are those of `other` to `base`: of each pair, and of the pooled requests of all pairs.
    """
    pooled = {name: quantiles([ttft for one in pairs for ttft in one[name]["ttft_s"]]) for name in (base, other)}
    by_pair = [_ratio(quantiles(one[base]["ttft_s"]), quantiles(one[other]["ttft_s"])) for one in pairs]
    return {
        "pooled": {
            **{f"{name}_ttft_ms": _milliseconds(values) for name, values in pooled.items()},
            "ratio": _ratio(pooled[base], pooled[other]),
        },
        "ratio_by_pair": {name: spread([one[name] for one in by_pair]) for name in by_pair[0]},
        "best_effort_tokens_per_s": spread([one[other]["best_effort_tokens_per_s"] for one in pairs]),
        "unfinished": sum(one[name]["unfinished"] for one in pairs for name in (base, other)),
        "pairs": [{name: _run(figures) for name, figures in one.items()} for one in pairs],
    }


def ratio_of_rates(pairs: Sequence[Mapping[str, float]], over: str, under: str) -> Figures:
    return {
        "ratio": spread([one[over] / one[under] for one in pairs]),
        **{name: spread([one[name] for one in pairs]) for name in (over, under)},
    }


def spread(values: Sequence[float]) -> Figures:
    return {**harness.spread(values), "all": [round(value, 3) for value in values]}


def quantiles(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{level}": percentile(ordered, level) for level in QUANTILES}


def report(record: Figures, out: Path | None) -> int:
    """Print and write the record, and return 1 if a target is missed."""
    harness.report(record, out)
    holds = {recipe: one["holds"] for recipe, one in record["recipes"].items()}
    harness.show(holds)
    return 0 if all(all(one.values()) for one in holds.values()) else 1


def _ratio(base: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: round(other[name] / base[name], 3) for name in base}


def _milliseconds(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1000 * value, 1) for name, value in values.items()}


def _run(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if name != "ttft_s"} | {
        "ttft_ms": _milliseconds(quantiles(figures["ttft_s"]))
    }
