"""FastServe section 4.2 on a real engine over HTTP: ways to free memory where copies are as dear as on a GPU.

The engine of `engine` has a link to CPU memory (`--swap-bandwidth-gbps`) on which the KV of a mean request takes 0.6
decode steps, as OPT-175B's does on the paper's GPUs (36 ms of 60 ms). KV is swapped proactively (`fastserve`), swapped
when blocks run out (`fastserve-reactive`), or dropped and recomputed (`fastserve-recompute`). Recipes take turns in
alternating order, once per seed.

The record has mean latencies, their share in which copies delayed requests, and the simulator's prediction of each run.
`--predict` only profiles and simulates; `--quick` runs one seed for a short time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
import harness
from papers.fastserve.engine.run import LENGTHS, QUICK_S, Setup, carry_on, minutes_of, options, plan, prepare, result
from skipjoin.config.profile import read_profile
from skipjoin.core.step import StepShape
from skipjoin.workload.workload import synthetic

RECIPES = ("fastserve", "fastserve-reactive", "fastserve-recompute")
# Multiples of the capacity of `fcfs`.
LOADS, QUICK_LOADS = (1.1, 1.4), (1.4,)
DURATION_S, REPEATS = 60.0, 3
# Share of a decode step in which the link moves the KV of a mean request, and requests in that step.
STEP_SHARE, BATCH = 0.6, 12


def link_gbps(profile_file: Path) -> float:
    """Return the bandwidth on which a mean request's KV takes `STEP_SHARE` of a decode step of `BATCH` requests."""
    profile, lengths = read_profile(profile_file), synthetic(LENGTHS, "poisson").streams[0].lengths
    prompt, output = lengths.mean()
    tokens = prompt + output / 2
    step_s = profile.cost.step(StepShape(decodes=BATCH, context=round(BATCH * tokens)))
    blocks = -(-tokens // profile.block_size)
    return round(8e-9 * blocks * profile.cpu_bytes_per_block / (STEP_SHARE * step_s), 3)


def delay_share(row: dict[str, Any]) -> float:
    """Return the share of all latencies in which copies of KV delayed requests."""
    return float(row["swap_delay_s"] / (row["jct_s"]["mean"] * row["requests"]["finished"]))


def summary(rows: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return means over seeds for each load and recipe, with ratios to proactive swapping."""
    found: dict[tuple[float, str], dict[str, Any]] = {}
    for load in sorted({row["load"] for row in rows}):
        for recipe in RECIPES:
            mine = [row[kind] for row in rows if row["load"] == load and row["recipe"] == recipe and kind in row]
            if not mine:
                continue
            means = {name: fmean(one[name]["mean"] for one in mine) for name in ("jct_s", "normalized_latency_s")}
            first = found.get((load, RECIPES[0]), means)
            found[load, recipe] = means | {
                "load": load,
                "recipe": recipe,
                "runs": len(mine),
                "to_proactive": {name: round(value / first[name], 3) for name, value in means.items()},
                "delay_share": round(fmean(map(delay_share, mine)), 4),
            }
    return list(found.values())


def whole(setup: Setup, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = result(setup, rows)
    del found["largest_rate_rps"]
    found["settings"]["link_gbps"] = setup.link_gbps
    return found | {"summary": {kind: summary(rows, kind) for kind in ("measured", "predicted")}}


def main() -> None:
    parser = options(__doc__, "run one seed for eight seconds", REPEATS, DURATION_S)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="multiples of the capacity of fcfs")
    args = parser.parse_args()
    loads = dict.fromkeys(RECIPES, QUICK_LOADS if args.quick else tuple(args.loads))
    repeats, duration_s = (1, QUICK_S) if args.quick else (args.repeats, args.duration)
    header = harness.new_record()
    with harness.scratch() as folder:
        setup = prepare(folder, args, duration_s)
        setup = replace(setup, link_gbps=link_gbps(setup.profile))
        rows = plan(setup, loads, repeats)
        harness.show(f"{len(rows)} runs, link of {setup.link_gbps} Gb/s, about {minutes_of(rows):.0f} minutes")
        for kind, found in carry_on(args, header, setup, rows, whole)["summary"].items():
            for one in found:
                harness.show(kind, one)


if __name__ == "__main__":
    main()
