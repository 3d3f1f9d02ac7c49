"""Decisions do not change: the records of fixed simulated runs equal the stored ones to the last digit."""

from __future__ import annotations

import json

import pytest
from recorded_runs import HASHES, RESERVING, RUNS, record_hashes

STORED = json.loads(HASHES.read_text()) if HASHES.exists() else {}


@pytest.mark.parametrize("run", RUNS)
def test_records_equal_the_stored_ones(run: str) -> None:
    assert record_hashes(run) == STORED[run]


def test_only_reservations_depend_on_max_tokens() -> None:
    run = "a100-40gb:pp2, swap 1"
    changed = record_hashes(run, "--max-tokens", "room")
    assert {name.split(",")[0] for name, found in changed.items() if found != STORED[run][name]} == set(RESERVING)
