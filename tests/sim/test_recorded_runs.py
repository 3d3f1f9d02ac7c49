"""Decisions do not change: the records of fixed simulated runs equal the stored ones to the last digit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from recorded_runs import HASHES, RECIPES, RESERVING, RUNS, record_hashes

from support.recipes import SPELLED
from support.worlds import checkered, exhaustive

STORED = json.loads(HASHES.read_text()) if HASHES.exists() else {}


# `test_only_reservations_depend_on_max_tokens` compares hashes of this run as well.
AGAIN = "a100-40gb:pp2, swap 1"
AGAIN_RECIPES = ("fastserve", "orca")
MORE_RECIPES = ("fcfs", "mlfq", "sarathi", "static")


def cases() -> list[Any]:
    """Return a test parameter for each run and half of the recipes. `make test` runs each recipe at least once."""
    flat = [run for run in RUNS if ":pp2" not in run]
    staged = [run for run in RUNS if run not in flat]
    return [*checkered(flat, (0, 1)), *(exhaustive(*case) for case in product(staged, (0, 1)))]


@pytest.mark.parametrize("seed", [0, exhaustive(1)])
@pytest.mark.parametrize(("run", "half"), cases())
def test_records_equal_the_stored_ones(run: str, half: int, seed: int) -> None:
    labels = RECIPES[half::2]
    expected = {name: STORED[run][name] for name in (f"{label}, seed {seed}" for label in labels)}
    recipes = ",".join(SPELLED[label] for label in labels)
    assert record_hashes(run, "--seeds", f"{seed}", "--recipes", recipes) == expected


@pytest.mark.parametrize("labels", [AGAIN_RECIPES, exhaustive(MORE_RECIPES)], ids=len)
def test_only_reservations_depend_on_max_tokens(labels: Sequence[str]) -> None:
    recipes = ",".join(SPELLED[label] for label in labels)
    changed = record_hashes(AGAIN, "--max-tokens", "room", "--seeds", "0", "--recipes", recipes)
    assert len(changed) == len(labels)
    differ = {name.split(",")[0] for name, found in changed.items() if found != STORED[AGAIN][name]}
    assert differ == set(RESERVING).intersection(labels)
