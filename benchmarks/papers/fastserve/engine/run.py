"""FastServe's claim on a real engine over HTTP: how much more load than first come, first served, under one bound.

    python benchmarks/papers/fastserve/engine/run.py [--out FILE] [--quick | --predict] [--profile FILE]

One recipe after the other is started as `skipjoin serve` and loaded with `skipjoin bench`, and all that again with the
next seed, so that a drift of the machine meets all alike. The bound is ten times the decode iteration of a request that
is alone, measured over HTTP at the start (FastServe section 6.1). The figure is the largest rate at which the mean
normalized latency keeps the bound, interpolated between the rates that were measured.

Rates are shares of what `fcfs` sustains according to the simulator with this run's own profile, so that the knees are
met on a machine of any speed. The simulator's prediction stands beside every measurement. The result is written after
every run. `--predict` simulates and measures nothing but the profile; `--quick` runs `fcfs` and `fastserve` once.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from machine import describe_machine
from papers.recipes import SPELLED
from random_model import make_model
from skipjoin.config.profile import read_profile
from skipjoin.core.step import StepShape
from skipjoin.observe.record import Record, preempted
from skipjoin.report.bound import maximum_rate, parse_bound
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import Cell, Extent
from skipjoin.sim.experiments.simulation import run as simulate
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import synthetic

# Weights of four bytes: a decode iteration is bound by reading them, as on a GPU, so that a batch of 12 takes about
# 1.6 iterations of one request. With two bytes it is bound by arithmetic here, and takes 2.2.
DTYPE = torch.float32
# The other core has the client, the API process and the copies of KV, which would otherwise stop the model's threads.
THREADS = 1
# ShareGPT's shape at a quarter: 40 tokens of prompt and 83 of output on average, 520 at most.
LENGTHS = "sharegpt*0.25"
# Room for 1,450 tokens: `fcfs` runs 12 requests at a time, where the cap would let it run 64.
KV_GIB, MAX_NUM_SEQS, MAX_TOKENS = 0.1, 64, 512
# More than everything that is unfinished at the highest load ever holds.
SWAP_GIB = 2.0
# FastServe section 6.1: ten times the latency of a decode iteration under light load.
BOUND_FACTOR = 10
DURATION_S, REPEATS, PROFILE_S = 32.0, 2, 30.0
# Arrival rates over the capacity of `fcfs`: around its knee and around that of `fastserve`.
LOADS = {
    "fcfs": (1.5, 2.0),
    "fastserve": (1.7, 2.2, 2.8),
    "fastserve-reactive": (2.2, 2.8),
    "fastserve-recompute": (1.7, 2.2),
    "fastserve-defer": (2.2, 2.8),
    "srpt": (2.8,),
}
QUICK_LOADS: dict[str, tuple[float, ...]] = {"fcfs": (1.4,), "fastserve": (1.4,)}
QUICK_S = 8.0

START_TIMEOUT_S, RUN_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 400.0, 40.0
# A request of this shape, alone, tells the decode iteration; it is long over when the next one comes.
LIGHT_LENGTHS, LIGHT_RATE, LIGHT_REQUESTS = "fixed:40,30", 0.4, 4
COUNTERS = {
    "preemptions": "num_preemptions_total",
    "swapped_out_bytes": "swap_out_bytes_total",
    "swapped_in_bytes": "swap_in_bytes_total",
    "recomputed_tokens": "recomputed_tokens_total",
    "swap_stall_s": "swap_stall_seconds_total",
    "generated_tokens": "generation_tokens_total",
    "steps": "engine_steps_total",
}
FIELDS = ("normalized_latency_s", "ttft_s", "tpot_s")
SKIPJOIN = str(Path(sys.executable).with_name("skipjoin"))


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs share. light_s: decode iteration of a request that is alone; the bound follows from it."""

    model: Path
    profile: Path
    duration_s: float
    light_s: float

    @property
    def bound_s(self) -> float:
        """Seconds per output token that the mean may reach, rounded as the server is told it."""
        return round(BOUND_FACTOR * self.light_s, 4)


# -- the simulator ----------------------------------------------------------------------------------------


def system(setup: Setup, recipe: str) -> System:
    """What the server is, for the simulator."""
    machine = Machine(hardware=str(setup.profile), kv_gib=KV_GIB, swap_gib=SWAP_GIB)
    settings = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_TOKENS, "max_tokens": "exact"}
    (found,) = machine.systems(SPELLED[recipe], slo_s=setup.bound_s, **settings)
    return found


def cell(setup: Setup, recipe: str, rate: float, seed: int) -> Cell:
    """One run; the server gets the same requests at the same times."""
    return Cell(system(setup, recipe), synthetic(LENGTHS, "poisson"), Extent(rate, setup.duration_s, seed))


def capacity(setup: Setup) -> float:
    """Requests per second that `fcfs` finishes when none has to arrive any more."""
    base = cell(setup, "fcfs", 1.0, 0)
    rate: float = simulate(replace(base, extent=Extent(1e4, None, 0, 600)))["throughput_rps"]
    return rate


def light_iteration(profile: Path) -> float:
    """Seconds of a decode step of one request according to the profile."""
    return read_profile(profile).cost.step(StepShape(decodes=1, context=70))


# -- the server and the client ----------------------------------------------------------------------------


@contextmanager
def server(setup: Setup, recipe: str) -> Iterator[str]:
    """A server with nothing else to do; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [SKIPJOIN, "serve", setup.model, "--recipe", SPELLED[recipe], "--port", port, "--profile", setup.profile]
    command += ["--set", "oracle=max-tokens"] if recipe == "srpt" else []
    command += ["--threads", THREADS, "--kv-cache-gib", KV_GIB, "--swap-space", SWAP_GIB, "--slo", setup.bound_s]
    command += ["--max-num-seqs", MAX_NUM_SEQS, "--max-num-batched-tokens", MAX_TOKENS]
    # No request is refused: the comparison is about order.
    command += ["--max-num-queued-reqs", 100_000, "--max-num-queued-tokens", 100_000_000]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    base_url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, base_url)
        yield base_url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], base_url: str) -> None:
    """Return when the server takes requests. Raises RuntimeError if it ends, or takes too long."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{base_url}/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S:g} s")


def load(base_url: str, lengths: str, *options: object) -> Record:
    """What one run of `skipjoin bench` recorded. Raises RuntimeError if it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as folder:
        out = Path(folder) / "record.json"
        command = [SKIPJOIN, "bench", "--base-url", base_url, "--lengths", lengths, "--out", out, *options]
        try:
            subprocess.run([str(part) for part in command], stdout=sys.stderr, timeout=RUN_TIMEOUT_S, check=True)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"skipjoin bench: {error}") from error
        (record,) = json.loads(out.read_text())
    found: Record = record
    return found


def light_load(base_url: str) -> float:
    """Seconds of a decode iteration of a request that is alone."""
    options = ("--arrivals", "constant", "--rates", LIGHT_RATE, "--requests", LIGHT_REQUESTS, "--warmup", 1)
    seconds: float = load(base_url, LIGHT_LENGTHS, *options)["tpot_s"]["p50"]
    return seconds


def counters(base_url: str) -> dict[str, float]:
    """The engine's counters, summed over their labels."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    totals = dict.fromkeys(COUNTERS, 0.0)
    for name, metric in COUNTERS.items():
        for line in lines:
            if line.startswith((f"skipjoin:{metric} ", f"skipjoin:{metric}{{")):
                totals[name] += float(line.rsplit(" ", 1)[1])
    return totals


# -- one run and all runs ---------------------------------------------------------------------------------


def chosen(record: Record, engine: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that the result keeps."""
    part: dict[str, Any] = {name: {key: record[name][key] for key in ("mean", "p95")} for name in FIELDS}
    part |= {"requests": record["requests"], "duration_s": record["duration_s"], **engine}
    return part


def predicted(one: Cell) -> dict[str, Any]:
    """What the simulator says of the run."""
    record = simulate(one)
    engine = {name: record["kv"][name] for name in COUNTERS if name in record["kv"]}
    engine["preemptions"] = preempted(record)
    return chosen(record, {**engine, "steps": record["steps"], "batch_mean": record["batch_mean"]})


def measured(base_url: str, one: Cell) -> dict[str, Any]:
    """What client and server say of the run."""
    extent, before = one.extent, counters(base_url)
    options = ("--rates", extent.rate_rps, "--duration", extent.duration_s, "--seeds", extent.seed, "--warmup", 0)
    record = load(base_url, LENGTHS, *options)
    time.sleep(1.0)  # the engine tells its numbers now and then
    engine: dict[str, Any] = {name: total - before[name] for name, total in counters(base_url).items()}
    engine["wanted_tokens"] = sum(job.output_tokens for job in one.jobs())
    engine["batch_mean"] = engine["generated_tokens"] / max(1.0, engine["steps"])
    return chosen(record, {**engine, "lag_p99_s": record["client"]["lag_p99_s"]})


def plan(setup: Setup, loads: dict[str, tuple[float, ...]], repeats: int) -> list[dict[str, Any]]:
    """All runs in their order, each with its prediction."""
    full = capacity(setup)
    rows = []
    for seed in range(repeats):
        for recipe, shares in loads.items():
            for share in shares:
                rate = round(share * full, 3)
                row: dict[str, Any] = {"recipe": recipe, "seed": seed, "load": share, "rate_rps": rate}
                rows.append(row | {"predicted": predicted(cell(setup, recipe, rate, seed))})
    return rows


def carry_out(setup: Setup, rows: Sequence[dict[str, Any]], keep: Any) -> None:
    """Measure the runs, with a fresh server for each recipe of each repeat. keep: called after every run."""
    for turn in dict.fromkeys((row["seed"], row["recipe"]) for row in rows):
        mine = [row for row in rows if (row["seed"], row["recipe"]) == turn]
        try:
            with server(setup, turn[1]) as base_url:
                light_s = light_load(base_url)
                for row in mine:
                    row["light_s"] = light_s
                    row["measured"] = measured(base_url, cell(setup, row["recipe"], row["rate_rps"], row["seed"]))
                    keep()
        except RuntimeError as error:
            for row in mine:
                if "measured" not in row:
                    row["failed"] = str(error)
            keep()


def rates_at_bound(setup: Setup, rows: Sequence[dict[str, Any]], kind: str) -> dict[str, str | None]:
    """The largest rate under the bound of each recipe; None if it does not even hold at the lowest."""
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
    """A line per run: measured figures, those predicted in brackets."""
    for row in rows:
        line = f"{row['recipe']:20} seed {row['seed']} {row['rate_rps']:6.3f} req/s"
        for name in ("normalized_latency_s", "ttft_s"):
            for key in ("mean", "p95"):
                real = f"{row['measured'][name][key]:.3f}" if "measured" in row else row.get("failed", "-")
                line += f"  {name.split('_')[0]} {key} {real} ({row['predicted'][name][key]:.3f})"
        print(line, flush=True)


def prepare(folder: Path, args: argparse.Namespace, duration_s: float) -> Setup:
    """Model, profile and light-load iteration."""
    model, profile = folder / "model", args.profile or folder / "profile.json"
    make_model(model, DTYPE)
    if args.profile is None:
        command = [SKIPJOIN, "profile", model, "--out", profile, "--seconds", 6 if args.quick else PROFILE_S]
        command += ["--threads", THREADS, "--kv-cache-gib", KV_GIB]
        command += ["--max-num-seqs", MAX_NUM_SEQS, "--max-num-batched-tokens", MAX_TOKENS]
        subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
    setup = Setup(model, profile, duration_s, light_iteration(profile))
    if args.predict:
        return setup
    with server(setup, "fcfs") as base_url:
        return replace(setup, light_s=light_load(base_url))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two recipes at one rate, in two minutes")
    parser.add_argument("--predict", action="store_true", help="only simulate")
    parser.add_argument("--profile", type=Path, help="of this model and one thread, instead of a new one")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--duration", type=float, default=DURATION_S, help="seconds of arrivals in a run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    loads = QUICK_LOADS if args.quick else LOADS
    repeats, duration_s = (1, QUICK_S) if args.quick else (args.repeats, args.duration)
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as folder:
        machine = describe_machine()
        setup = prepare(Path(folder), args, duration_s)
        rows = plan(setup, loads, repeats)
        minutes = sum(row["predicted"]["duration_s"] + 4 for row in rows) / 60 + len(loads) * repeats * 20 / 60
        print(f"{len(rows)} runs, bound {setup.bound_s} s per token, about {minutes:.0f} minutes", flush=True)

        def keep() -> None:
            if args.out:
                args.out.write_text(json.dumps(result(setup, machine, rows), indent=1) + "\n")
            show([row for row in rows if "measured" in row or "failed" in row][-1:])

        if args.predict:
            show(rows)
        else:
            carry_out(setup, rows, keep)
        print(json.dumps(result(setup, machine, rows)["largest_rate_rps"], indent=1, ensure_ascii=False))


def result(setup: Setup, machine: dict[str, object], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record of everything."""
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
    return {"machine": machine, "settings": settings, "profile": kept, "largest_rate_rps": largest, "rows": list(rows)}


if __name__ == "__main__":
    main()
