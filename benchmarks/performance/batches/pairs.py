"""Pairs of runs: their ratios and spread, and the records of the benchmarks that compare them."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from served import QUANTILES, Figures

from skipjoin.observe.record import percentile

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine


def arguments(
    about: str, *, pairs: int, seconds: float, recipes: Iterable[str], parts: Iterable[str]
) -> argparse.Namespace:
    """Of a benchmark. about: its text. recipes, parts: those that it knows."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=list(recipes))
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(parts))
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--seconds", type=float, default=seconds, help="in which requests of a run arrive")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def compared(pairs: Sequence[dict[str, Figures]], base: str, other: str) -> Figures:
    """Times to the first token of chat in pairs of runs, and the ratio `other` to `base`: of each pair, and of all
    pairs' requests together."""
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
    """Of two figures of each pair."""
    return {
        "ratio": spread([one[over] / one[under] for one in pairs]),
        **{name: spread([one[name] for one in pairs]) for name in (over, under)},
    }


def spread(values: Sequence[float]) -> Figures:
    """Median, least and most, and all of them in order."""
    return {
        "median": round(statistics.median(values), 3),
        "range": [round(min(values), 3), round(max(values), 3)],
        "all": [round(value, 3) for value in values],
    }


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """By name, in the values' unit."""
    ordered = sorted(values)
    return {f"p{level}": percentile(ordered, level) for level in QUANTILES}


def report(found: Figures, out: Path | None) -> int:
    """Print the figures and keep them; 1 if a criterion does not hold."""
    found["machine"] = describe_machine()
    print(json.dumps(found, indent=1))
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    holds = {recipe: one["holds"] for recipe, one in found["recipes"].items()}
    print(json.dumps(holds, indent=1))
    return 0 if all(all(one.values()) for one in holds.values()) else 1


def _ratio(base: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: round(other[name] / base[name], 3) for name in base}


def _milliseconds(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1000 * value, 1) for name, value in values.items()}


def _run(figures: Figures) -> Figures:
    return {name: value for name, value in figures.items() if name != "ttft_s"} | {
        "ttft_ms": _milliseconds(quantiles(figures["ttft_s"]))
    }
