"""How well the simulator predicts the engine: the same requests through both, with this machine's profile.

    python benchmarks/performance/parity/run.py [--repeats 3] [--duration 45] [--out FILE]

A random-weight Llama of 97.5M parameters in bfloat16, ShareGPT's lengths at a quarter, Poisson arrivals at 0.5 and 0.8
of the rate that the simulator says `fcfs` can sustain, `fcfs` and `fastserve`. Each repeat profiles the machine anew,
simulates, and then runs the engine in real time, in this process: requests enter between steps, as they do in the
server, and latencies count from the moment they were due. Wanted: mean normalized latency within 20 %, P95 within 30 %.

`speed` is how long the steps of the real run took over what the profile says of them, and `corrected` the prediction
with all coefficients multiplied by it: the machine is shared, its speed changes between profile and run, and this is
what the simulator would have said of the machine as it was then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine
from random_model import VOCAB, make_model
from skipjoin.config import EngineConfig
from skipjoin.core.events import Computed
from skipjoin.core.step import StepShape
from skipjoin.engine.build import Engine, assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.observe.record import Record, add_usage, summarize
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.usage import EngineUsage
from skipjoin.policies.cost import LinearCost, scaled
from skipjoin.sampling import SamplingParams
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import Cell, Extent, run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import WorkloadRequest, synthetic

RECIPES, LOADS = ("fcfs", "fastserve"), (0.5, 0.8)
KV_GIB, MAX_NUM_SEQS, MAX_TOKENS = 0.5, 32, 512
WORKLOAD = synthetic("sharegpt*0.25", "poisson")
FIELDS = ("normalized_latency_s.mean", "normalized_latency_s.p95", "ttft_s.mean", "tpot_s.mean", "batch_mean")


def start(folder: Path, recipe: str, profile: Path) -> Engine:
    """The engine as `skipjoin serve` would have it."""
    return assemble(
        EngineConfig(
            model=str(folder),
            dtype="bfloat16",
            recipe=recipe,
            profile=str(profile),
            kv_cache_gib=KV_GIB,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_TOKENS,
        )
    )


def real_run(engine: Engine, jobs: list[WorkloadRequest], cost: LinearCost) -> tuple[Record, float]:
    """Send the jobs when they are due, and wait for all. What came of it, and how long steps took over `cost`."""
    loop = EngineLoop(engine)
    info = engine.info
    ended: list[RequestFacts] = []
    log = RequestLog(ended.append)
    taken_s = expected_s = 0.0
    usage = EngineUsage(device_blocks=info.device_blocks, block_size=info.block_size, block_bytes=info.host_block_bytes)
    begin = loop.clock()
    left = deque(enumerate(jobs))
    while left or not loop.idle:
        while left and left[0][1].at <= loop.clock() - begin:
            number, job = left.popleft()
            prompt = [3 + (number * 7919 + place * 104729) % (VOCAB - 3) for place in range(job.prompt_tokens)]
            loop.add(number, prompt, SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True))
        if loop.idle and left:
            time.sleep(max(0.0, left[0][1].at - (loop.clock() - begin)))
            continue
        events = loop.step()
        log.observe(events)
        usage.observe(events)
        for event in events:
            if isinstance(event, Computed):
                taken_s += event.result.seconds
                expected_s += cost.step(StepShape.of(event.result.plan.slices))
    end = loop.clock() - begin
    loop.close()
    for facts in ended:
        facts.arrival = begin + jobs[facts.id].at
    record = summarize(ended, now=end)
    add_usage(record, [usage])
    return record, taken_s / expected_s


def value(record: Record, field: str) -> float:
    """The number in a dotted field."""
    first, _, second = field.partition(".")
    found: float = record[first][second] if second else record[first]
    return found


def profile(folder: Path, out: Path, seconds: float) -> None:
    """Measure this machine now, as `skipjoin profile` does."""
    command = [Path(sys.executable).with_name("skipjoin"), "profile", folder, "--seconds", str(seconds), "--out", out]
    subprocess.run(command, check=True, stdout=sys.stderr)


def capacity(system: System) -> float:
    """Requests per second that `fcfs` finishes when none has to arrive any more."""
    cell = Cell(replace(system, recipe="fcfs"), WORKLOAD, Extent(1e4, None, 0, 600))
    rate: float = run(cell)["throughput_rps"]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--duration", type=float, default=45.0)
    parser.add_argument("--profile-seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    scratch = tempfile.TemporaryDirectory(prefix="skipjoin-bench-")
    folder, path = Path(scratch.name) / "model", Path(scratch.name) / "profile.json"
    make_model(folder, torch.bfloat16)
    rows, full = [], None
    for repeat in range(args.repeats):
        profile(folder, path, args.profile_seconds)
        machine = Machine(hardware=str(path), kv_gib=KV_GIB)
        for load in LOADS:
            for recipe in RECIPES:
                (system,) = machine.systems(
                    recipe, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS, max_tokens="exact"
                )
                full = full or capacity(system)
                cell = Cell(system, WORKLOAD, Extent(load * full, args.duration, repeat))
                predicted = run(cell)
                engine = start(folder, recipe, path)
                assert isinstance(system.cost, LinearCost)
                measured, speed = real_run(engine, cell.jobs(), system.cost)
                corrected = run(replace(cell, system=replace(system, cost=scaled(system.cost, speed))))
                row: dict[str, object] = {"repeat": repeat, "load": load, "recipe": recipe, "rate_rps": load * full}
                row["speed"] = round(speed, 4)
                for field in FIELDS:
                    real = value(measured, field)
                    row[field] = {
                        "measured": real,
                        "predicted": value(predicted, field),
                        "error": round(value(predicted, field) / real - 1, 4),
                        "corrected_error": round(value(corrected, field) / real - 1, 4),
                    }
                row["requests"] = measured["requests"]
                row["breakdown_s"] = {"measured": measured["breakdown_s"], "predicted": predicted["breakdown_s"]}
                rows.append(row)
                print(json.dumps(row), flush=True)
    summary = summarize_rows(rows)
    print(json.dumps(summary, indent=1))
    if args.out:
        settings = {
            "lengths": "sharegpt*0.25",
            "duration_s": args.duration,
            "kv_gib": KV_GIB,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_TOKENS,
            "capacity_rps": full,
        }
        record = {"machine": describe_machine(), "settings": settings, "summary": summary, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def summarize_rows(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Median, least and greatest error over the repeats."""
    summary = []
    for load in LOADS:
        for recipe in RECIPES:
            chosen = [row for row in rows if (row["load"], row["recipe"]) == (load, recipe)]
            line: dict[str, object] = {"load": load, "recipe": recipe, "speed": [row["speed"] for row in chosen]}
            for field in FIELDS:
                for kind in ("error", "corrected_error"):
                    errors = [row[field][kind] for row in chosen]  # type: ignore[index]
                    line[f"{field} {kind}"] = [round(f(errors), 4) for f in (statistics.median, min, max)]
            summary.append(line)
    return summary


if __name__ == "__main__":
    main()
