"""Measure FastServe's claim on a real engine over HTTP: the largest rate of each recipe under one latency bound.

Each recipe in turn runs as `skipjoin serve` under the load of `skipjoin bench`, and then all recipes again in reverse
with the next seed, so that a drift of the machine affects all. The bound is ten times the decode iteration of a single
request, measured over HTTP at the start (FastServe section 6.1). The figure is the largest rate at which the mean
normalized latency keeps the bound, interpolated between measured rates.

Rates are multiples of the capacity of `fcfs` in the simulator with the profile of this run, so they suit a machine of
any speed; `--loads` changes them. The record has the simulator's prediction for each run, and is written after each.
`--predict` only profiles and simulates; `--quick` runs `fcfs` and `fastserve` once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
import harness
from papers.recipes import SPELLED
from random_model import make_model
from servers import NO_REFUSALS, Skipjoin, bench
from skipjoin.config.profile import read_profile
from skipjoin.core.step import StepShape
from skipjoin.observe.record import Record, preempted
from skipjoin.report.bound import maximum_rate, parse_bound
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run as simulate
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import synthetic

# With four-byte weights a decode iteration is memory-bound, as on a GPU: a batch of 12 takes about 1.6 iterations of a
# single request. With two bytes it is compute-bound here and takes 2.2.
DTYPE = torch.float32
# The client, the API process and the copies of KV get the other core.
THREADS = 1
# A quarter of ShareGPT's lengths: means of 40 prompt and 83 output tokens, at most 520 in total.
LENGTHS = "sharegpt*0.25"
# KV for 1,450 tokens: `fcfs` runs 12 requests at a time, where the batch cap allows 64.
KV_GIB, MAX_NUM_SEQS, MAX_TOKENS = 0.1, 64, 512
# More than all unfinished requests hold at the highest load.
SWAP_GIB = 2.0
# FastServe section 6.1: ten times the latency of a decode iteration under light load.
BOUND_FACTOR = 10
DURATION_S, REPEATS, PROFILE_S = 120.0, 5, 30.0
# Multiples of the capacity of `fcfs`, around the rates at which the recipes reach the bound in this time.
LOADS = {
    "fcfs": (0.9, 1.15),
    "fastserve": (1.2, 1.5, 1.8),
    "fastserve-reactive": (1.2, 1.5),
    "fastserve-recompute": (0.9, 1.2),
    "fastserve-defer": (1.2, 1.5),
    "srpt": (2.4,),
}
QUICK_LOADS: dict[str, tuple[float, ...]] = {"fcfs": (1.4,), "fastserve": (1.4,)}
QUICK_S = 8.0
# Single requests that measure the decode iteration; each finishes before the next one arrives.
LIGHT_LENGTHS, LIGHT_RATE, LIGHT_REQUESTS = "fixed:40,30", 0.4, 4
COUNTERS = {
    "preemptions": "num_preemptions_total",
    "swapped_out_bytes": "swap_out_bytes_total",
    "swapped_in_bytes": "swap_in_bytes_total",
    "recomputed_tokens": "recomputed_tokens_total",
    "swap_stall_s": "swap_stall_seconds_total",
    "swap_delay_s": "swap_delay_seconds_total",
    "generated_tokens": "generation_tokens_total",
    "steps": "engine_steps_total",
}
FIELDS = ("normalized_latency_s", "jct_s", "ttft_s", "tpot_s")


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share.

    Attributes:
        light_s: Decode iteration of a single request.
        link_gbps: Limit of the link to CPU memory; None for none.
    """

    model: Path
    profile: Path
    duration_s: float
    light_s: float
    link_gbps: float | None = None

    @property
    def bound_s(self) -> float:
        """Bound on the mean normalized latency in seconds per output token, as the server receives it."""
        return round(BOUND_FACTOR * self.light_s, 4)


# -- the simulator ----------------------------------------------------------------------------------------


def system(setup: Setup, recipe: str) -> System:
    machine = Machine(
        hardware=str(setup.profile), kv_gib=KV_GIB, swap_gib=SWAP_GIB, swap_bandwidth_gbps=setup.link_gbps
    )
    settings = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_TOKENS, "max_tokens": "exact"}
    (found,) = machine.systems(SPELLED[recipe], slo_s=setup.bound_s, **settings)
    return found


def cell(setup: Setup, recipe: str, rate: float, seed: int) -> Cell:
    """Return the simulated counterpart of a run, with the same requests at the same times."""
    return Cell(system(setup, recipe), synthetic(LENGTHS, "poisson"), Extent(rate, setup.duration_s, seed))


def capacity(setup: Setup) -> float:
    """Return the requests per second that `fcfs` finishes when all are present at the start."""
    base = cell(setup, "fcfs", 1.0, 0)
    rate: float = simulate(replace(base, extent=Extent(1e4, None, 0, 600)))["throughput_rps"]
    return rate


# -- the server and the client ----------------------------------------------------------------------------


def start(setup: Setup, recipe: str) -> Skipjoin:
    options: list[object] = ["--recipe", SPELLED[recipe], "--profile", setup.profile, "--slo", setup.bound_s]
    options += ["--set", "oracle=max-tokens"] if recipe == "srpt" else []
    options += ["--threads", THREADS, "--kv-cache-gib", KV_GIB, "--swap-space", SWAP_GIB]
    options += ["--max-num-seqs", MAX_NUM_SEQS, "--max-num-batched-tokens", MAX_TOKENS]
    options += [] if setup.link_gbps is None else ["--swap-bandwidth-gbps", setup.link_gbps]
    options += NO_REFUSALS
    return Skipjoin(setup.model, *options)


def light_load(server: Skipjoin) -> float:
    """Return the seconds of a decode iteration of a single request."""
    options = ("--arrivals", "constant", "--rates", LIGHT_RATE, "--requests", LIGHT_REQUESTS, "--warmup", 1)
    seconds: float = bench(server, "--lengths", LIGHT_LENGTHS, *options)["tpot_s"]["p50"]
    return seconds


def counters(server: Skipjoin) -> dict[str, float]:
    """Return the engine's counters, summed over their labels."""
    return {name: server.metric(metric) for name, metric in COUNTERS.items()}


# -- one run and all runs ---------------------------------------------------------------------------------


def chosen(record: Record, engine: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = {name: {key: record[name][key] for key in ("mean", "p95")} for name in FIELDS}
    part |= {"requests": record["requests"], "duration_s": record["duration_s"], **engine}
    return part


def predicted(one: Cell) -> dict[str, Any]:
    record = simulate(one)
    engine = {name: record["kv"][name] for name in COUNTERS if name in record["kv"]}
    engine["preemptions"] = preempted(record)
    engine["swap_delay_s"] = record["breakdown_s"]["swapping"] * record["requests"]["finished"]
    return chosen(record, {**engine, "steps": record["steps"], "batch_mean": record["batch_mean"]})


def measured(server: Skipjoin, one: Cell) -> dict[str, Any]:
    extent, before = one.extent, counters(server)
    options = ("--rates", extent.rate_rps, "--duration", extent.duration_s, "--seeds", extent.seed, "--warmup", 0)
    record = bench(server, "--lengths", LENGTHS, *options)
    time.sleep(1.0)  # the engine reports its counters periodically
    engine: dict[str, Any] = {name: total - before[name] for name, total in counters(server).items()}
    engine["wanted_tokens"] = sum(job.output_tokens for job in one.jobs())
    engine["batch_mean"] = engine["generated_tokens"] / max(1.0, engine["steps"])
    return chosen(record, {**engine, "lag_p99_s": record["client"]["lag_p99_s"]})


def plan(setup: Setup, loads: dict[str, tuple[float, ...]], repeats: int) -> list[dict[str, Any]]:
    full = capacity(setup)
    rows = []
    for seed in range(repeats):
        for recipe, shares in harness.in_turn(loads.items(), seed):
            for share in shares:
                rate = round(share * full, 3)
                row: dict[str, Any] = {"recipe": recipe, "seed": seed, "load": share, "rate_rps": rate}
                rows.append(row | {"predicted": predicted(cell(setup, recipe, rate, seed))})
    return rows


def carry_out(setup: Setup, rows: Sequence[dict[str, Any]], keep: Callable[[], None]) -> None:
    """Measure the runs, with a new server for each recipe of each repeat, and call `keep` after every run."""
    for turn in dict.fromkeys((row["seed"], row["recipe"]) for row in rows):
        mine = [row for row in rows if (row["seed"], row["recipe"]) == turn]
        try:
            with start(setup, turn[1]) as server:
                light_s = light_load(server)
                for row in mine:
                    row["light_s"] = light_s
                    row["measured"] = measured(server, cell(setup, row["recipe"], row["rate_rps"], row["seed"]))
                    keep()
        except RuntimeError as error:
            for row in mine:
                if "measured" not in row:
                    row["failed"] = str(error)
            keep()


def rates_at_bound(setup: Setup, rows: Sequence[dict[str, Any]], kind: str) -> dict[str, str | None]:
    bound, found = parse_bound(f"normalized_latency_s.mean<={setup.bound_s}"), {}
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        points: dict[float, list[Record]] = {}
        for row in rows:
            if row["recipe"] == recipe and kind in row:
                points.setdefault(row["rate_rps"], []).append(row[kind])
        rate = maximum_rate(points, bound)
        found[recipe] = None if rate is None else str(rate)
        failed = sum(row["recipe"] == recipe and "failed" in row for row in rows)
        if failed and kind == "measured":
            found[recipe] = f"{found[recipe]} ({failed} runs failed)"
    return found


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line per run: measured figures, with predictions in parentheses."""
    for row in rows:
        line = f"{row['recipe']:20} seed {row['seed']} {row['rate_rps']:6.3f} req/s"
        for name in ("normalized_latency_s", "ttft_s"):
            for key in ("mean", "p95"):
                real = f"{row['measured'][name][key]:.3f}" if "measured" in row else row.get("failed", "-")
                line += f"  {name.split('_')[0]} {key} {real} ({row['predicted'][name][key]:.3f})"
        harness.show(line)


def prepare(folder: Path, args: argparse.Namespace, duration_s: float) -> Setup:
    """Create the model and the profile, and measure the decode iteration of a single request."""
    model, profile = folder / "model", args.profile or folder / "profile.json"
    make_model(model, DTYPE)
    if args.profile is None:
        limits = ("--threads", THREADS, "--kv-cache-gib", KV_GIB)
        limits += ("--max-num-seqs", MAX_NUM_SEQS, "--max-num-batched-tokens", MAX_TOKENS)
        seconds = 6 if args.quick else PROFILE_S
        harness.run_skipjoin("profile", model, "--out", profile, "--seconds", seconds, *limits)
    light_s = read_profile(profile).cost.step(StepShape(decodes=1, context=70))
    setup = Setup(model, profile, duration_s, light_s)
    if args.predict:
        return setup
    with start(setup, "fcfs") as server:
        return replace(setup, light_s=light_load(server))


def parse_loads(text: str) -> dict[str, tuple[float, ...]]:
    parts = [part.partition("=") for part in harness.words(text)]
    if unknown := [name for name, _, _ in parts if name not in SPELLED]:
        raise argparse.ArgumentTypeError(f"loads must name recipes of papers.recipes, got {', '.join(unknown)}")
    return {name: tuple(map(float, shares.split(":"))) for name, _, shares in parts}


def options(text: str | None, quick: str, repeats: int, duration_s: float) -> argparse.ArgumentParser:
    parser = harness.parser(text, repeats=repeats)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--predict", action="store_true", help="only profile and simulate")
    parser.add_argument("--profile", type=Path, help="existing profile of this model with one thread")
    parser.add_argument("--duration", type=float, default=duration_s, help="seconds of arrivals in a run")
    return parser


def carry_on(
    args: argparse.Namespace,
    header: dict[str, Any],
    setup: Setup,
    rows: list[dict[str, Any]],
    whole: Callable[[Setup, Sequence[dict[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """Measure the rows, or only show their predictions, and return the result, which is kept after each run."""

    def keep() -> None:
        harness.write_record(header | whole(setup, rows), args.out)
        show([row for row in rows if "measured" in row or "failed" in row][-1:])

    if args.predict:
        show(rows)
    else:
        carry_out(setup, rows, keep)
    return whole(setup, rows)


def main() -> None:
    parser = options(__doc__, "run two recipes at one rate, in two minutes", REPEATS, DURATION_S)
    parser.add_argument("--loads", type=parse_loads, default=LOADS, help="multiples of the capacity of fcfs by recipe")
    args = parser.parse_args()
    loads = QUICK_LOADS if args.quick else args.loads
    repeats, duration_s = (1, QUICK_S) if args.quick else (args.repeats, args.duration)
    header = harness.new_record()
    with harness.scratch() as folder:
        setup = prepare(folder, args, duration_s)
        rows = plan(setup, loads, repeats)
        harness.show(f"{len(rows)} runs, bound {setup.bound_s} s per token, about {minutes_of(rows):.0f} minutes")
        harness.show(carry_on(args, header, setup, rows, result)["largest_rate_rps"])


def minutes_of(rows: Sequence[dict[str, Any]]) -> float:
    starts = len({(row["seed"], row["recipe"]) for row in rows})
    return (sum(row["predicted"]["duration_s"] + 4 for row in rows) + 20 * starts) / 60


def result(setup: Setup, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    settings = {
        "dtype": str(DTYPE).removeprefix("torch."),
        "threads": THREADS,
        "lengths": LENGTHS,
        "duration_s": setup.duration_s,
        "kv_gib": KV_GIB,
        "swap_gib": SWAP_GIB,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
        "light_s": setup.light_s,
        "bound_s": setup.bound_s,
    }
    profile = json.loads(setup.profile.read_text())
    kept = {name: profile[name] for name in ("cost", "transfer_out", "transfer_in", "host_s", "kv_bytes_per_block")}
    largest = {kind: rates_at_bound(setup, rows, kind) for kind in ("measured", "predicted")}
    return {"settings": settings, "profile": kept, "largest_rate_rps": largest, "rows": list(rows)}


if __name__ == "__main__":
    main()
