"""Hashes of the records of fixed simulated runs: every recipe, pipeline depth, size of the CPU tier, and two seeds.

`python tests/sim/recorded_runs.py --write` stores new hashes after a change that is meant to change decisions.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))

from skipjoin.cli import app
from support.recipes import SPELLED, label_of

HASHES = Path(__file__).with_suffix(".json")
# The recipes that existed when the hashes were made; newer ones have tests of their own.
RECIPES = (
    "fastserve",
    "fastserve-defer",
    "fastserve-reactive",
    "fastserve-recompute",
    "fcfs",
    "fixed-priority",
    "mlfq",
    "orca",
    "sarathi",
    "srpt",
    "static",
)
# Fields of a record that are newer than the hashes or change with a release.
EXCLUDED = (
    "version",
    "wait_s",
    "recipe_params",
    "swap_dtype",
    "prediction",
    "forward",
    "groups",
    "shared_blocks_mean",
    "checkpointed_slots",
    "checkpointed_bytes",
    "restores",
    "hosted_requests",
    "hosted_blocks_mean",
    "vacated",
    "reserve_used_mean",
    "decision_ms",
    "jct_scale",
    "goodput_rps",
    "window",
    "service",
    "services",
    "basis",
)
# Streams that have been renamed since.
RENAMED = {"real-time": "interactive"}
# The keys of `kv.preemptions`, which was a single number when the hashes were made.
PREEMPTIONS = {"pause", "spill", "swap", "drop"}
# Recipes whose reservations depend on `max_tokens`.
RESERVING = ("orca", "static")
# The pools hold about twenty requests and arrivals exceed capacity, so that every kind of preemption occurs.
_COMMON = (
    "--model opt-13b --kv-gib 4 --rates 12 --requests 30 --max-num-seqs 24 --lengths sharegpt --seeds 0,1 --jobs 1 "
    "--set starvation_s=4 --best-effort-share 0.2 --max-tokens exact --recipes "
    + ",".join(SPELLED[label] for label in RECIPES)
)
RUNS = {
    f"{hardware}, swap {swap}": f"{_COMMON} --hardware {hardware} --swap-space {swap}"
    for hardware, swap in product(("a100-40gb", "a100-40gb:pp2"), (0, 1, 8))
}


def record_hashes(run: str, *options: str) -> dict[str, str]:
    """Return the hash of each record of a run, by the recipe's label and seed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.json"
        done = CliRunner().invoke(app, ["simulate", *RUNS[run].split(), *options, "--out", str(out)])
        assert done.exit_code == 0, done.output
        records = json.loads(out.read_text())
    named = [record | {"recipe": label_of(record["recipe"])} for record in records]
    return {f"{record['recipe']}, seed {record['workload']['seed']}": _hash(record) for record in named}


def _hash(record: dict[str, Any]) -> str:
    kept = _without(record)
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == PREEMPTIONS:
            return sum(value.values())
        return {RENAMED.get(name, name): _without(part) for name, part in value.items() if name not in EXCLUDED}
    # How `max_tokens` is chosen was not part of records when the hashes were made.
    return None if value in ("exact", "room") else value


if __name__ == "__main__":
    found = {run: record_hashes(run) for run in RUNS}
    if "--write" in sys.argv:
        HASHES.write_text(json.dumps(found, indent=1) + "\n")
    else:
        stored = json.loads(HASHES.read_text())
        for run, hashes in found.items():
            for name, value in hashes.items():
                if stored[run].get(name) != value:
                    print(f"{run}: {name} differs")
