"""Ratios of an arena's record: ours over the best of the others in hindsight, and over the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OURS, ORACLE, REFERENCE = "adaptive", "srpt", "fcfs"
# The others, of which the best in hindsight is compared per cell and metric.
PAPERS = ("fcfs", "sarathi", "fastserve", "alise")
RIVALS = ("hrrn", "ltr", "uniboost", "past-future")
# Rival where prompts are the load.
SHORTEST_PREFILL = "shortest-prefill"
CORE = (*PAPERS, OURS, ORACLE)
QUICK_RECIPES = ("fcfs", "fastserve", "alise", OURS, ORACLE)
# Metrics of which less is better, by name, with their place in a record.
LATENCIES = {
    "mean": ("normalized_latency_s", "mean"),
    "p95": ("normalized_latency_s", "p95"),
    "ttft_p95": ("ttft_s", "p95"),
}
# Also of cells in which prompts are the load.
TTFT_MEAN = "ttft_mean"
TITLES = {
    "mean": "mean normalized latency",
    "p95": "P95 normalized latency",
    "ttft_p95": "P95 TTFT",
    "throughput": "throughput, fcfs over ours",
}
_PROMPT_TITLES = TITLES | {TTFT_MEAN: "mean TTFT"}
# Geometric mean and worst ratio to reach in the final cells.
GOALS = {"mean": (0.97, 1.15), "p95": (1.0, 1.35), "ttft_p95": (0.85, 1.5), "throughput": (1 / 0.95, 1 / 0.95)}

# Those of the cells in which prompts are the load.
PROMPT_GOALS = {
    "mean": (0.93, 1.15),
    "p95": (0.97, 1.25),
    TTFT_MEAN: (1.05, 1.3),
    "ttft_p95": (0.25, 1.2),
    "throughput": (1 / 0.95, 1 / 0.95),
}

Figures = Mapping[str, float]
Cells = Mapping[str, Mapping[str, Any]]


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what the arena keeps of a simulated run's record."""
    found = {name: record[outer][inner] for name, (outer, inner) in LATENCIES.items()}
    return found | {
        "throughput": record["window"]["throughput_rps"],
        "longest_jct": max(record["quantiles"]["jct_s"]),
        "ttft_mean": record["ttft_s"]["mean"],
    }


def ratios(recipes: Mapping[str, Figures], others: Iterable[str] = PAPERS) -> dict[str, float]:
    """Return the ratios of one cell by metric, below 1 where ours is better."""
    ours, compared = recipes[OURS], [recipes[name] for name in others if name in recipes]
    names = (*LATENCIES, *((TTFT_MEAN,) if TTFT_MEAN in ours else ()))
    found = {name: ours[name] / min(one[name] for one in compared) for name in names}
    return found | {"throughput": recipes[REFERENCE]["throughput"] / ours["throughput"]}


def summary(
    cells: Cells, others: Iterable[str] = PAPERS, *, metrics: Iterable[str] = TITLES
) -> dict[str, dict[str, Any]]:
    """Return the geometric mean and the worst cell of each metric, over the cells that have all they need."""
    others = tuple(others)
    complete = {name: one["recipes"] for name, one in cells.items() if {OURS, REFERENCE} <= one["recipes"].keys()}
    found: dict[str, dict[str, Any]] = {}
    for metric in metrics:
        values = {name: ratios(recipes, others)[metric] for name, recipes in complete.items()}
        if values:
            worst = max(values, key=values.__getitem__)
            found[metric] = {
                "cells": len(values),
                "mean": round(geometric(values.values()), 3),
                "worst": round(values[worst], 3),
                "worst_cell": worst,
            }
    return found


def with_rivals(cells: Cells) -> Cells:
    return {name: one for name, one in cells.items() if set(RIVALS) <= one["recipes"].keys()}


def oracle_gap(cells: Cells) -> float | None:
    """Return the geometric mean over cells of our mean latency over the oracle's."""
    gaps = [
        one["recipes"][OURS]["mean"] / one["recipes"][ORACLE]["mean"]
        for one in cells.values()
        if {OURS, ORACLE} <= one["recipes"].keys()
    ]
    return round(geometric(gaps), 3) if gaps else None


def geometric(values: Iterable[float]) -> float:
    values = list(values)
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def cell_line(name: str, recipes: Mapping[str, Figures]) -> str:
    """Return a cell's mean latencies and ratios as a line of text."""
    means = " ".join(f"{recipe} {one['mean']:.4f}" for recipe, one in recipes.items())
    if not {OURS, REFERENCE} <= recipes.keys():
        return f"{name}: {means}"
    found = ratios(recipes)
    return f"{name}: {means} | " + " ".join(f"{metric} {value:.2f}" for metric, value in found.items())


def table(found: Mapping[str, Mapping[str, Any]], goals: Mapping[str, tuple[float, float]] = GOALS) -> Sequence[str]:
    lines = []
    for metric, one in found.items():
        goal, most = goals[metric]
        lines.append(
            f"{_PROMPT_TITLES[metric]}: {one['mean']:.3f} over {one['cells']} cells (goal {goal:.3g}), "
            f"worst {one['worst']:.2f} (goal {most:.3g}) in {one['worst_cell']}"
        )
    return lines
