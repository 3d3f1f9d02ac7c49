"""Recipes that tests run, by label: those of the package, and variants and baselines of `benchmarks/papers`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from skipjoin.core.policy_set import Policies
from skipjoin.options import Value
from skipjoin.recipes import Settings, registry

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from papers.recipes import LABELLED, SPELLED, label_of

RECIPES = LABELLED

__all__ = ["RECIPES", "SPELLED", "build", "label_of", "own"]


def build(label: str, settings: Settings, given: Mapping[str, Value] | None = None) -> Policies:
    return RECIPES[label].build(settings, given or {})


def own(label: str, given: Mapping[str, Value]) -> dict[str, Value]:
    return registry.own(SPELLED[label], given)
