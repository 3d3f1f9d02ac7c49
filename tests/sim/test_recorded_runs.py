"""Decisions do not change: the records of fixed simulated runs equal the stored ones to the last digit."""

from __future__ import annotations

import json

import pytest
from recorded_runs import HASHES, RESERVING, RUNS, record_hashes

from support.recipes import SPELLED
from support.worlds import exhaustive

STORED = json.loads(HASHES.read_text()) if HASHES.exists() else {}


# `test_only_reservations_depend_on_max_tokens` compares hashes of this run as well.
AGAIN = "a100-40gb:pp2, swap 1"
AGAIN_RECIPES = ("fastserve", "fcfs", "mlfq", "orca", "sarathi", "static")


@pytest.mark.parametrize("seed", [0, exhaustive(1)])
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.exhaustive] if ":pp2" in run else []) for run in RUNS]
)
def test_records_equal_the_stored_ones(run: str, seed: int) -> None:
    expected = {name: value for name, value in STORED[run].items() if name.endswith(f"seed {seed}")}
    assert record_hashes(run, "--seeds", f"{seed}") == expected


def test_only_reservations_depend_on_max_tokens() -> None:
    recipes = ",".join(SPELLED[label] for label in AGAIN_RECIPES)
    changed = record_hashes(AGAIN, "--max-tokens", "room", "--seeds", "0", "--recipes", recipes)
    assert len(changed) == len(AGAIN_RECIPES)
    assert {name.split(",")[0] for name, found in changed.items() if found != STORED[AGAIN][name]} == set(RESERVING)
