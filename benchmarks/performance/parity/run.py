"""Compare the simulator's predictions with the engine: the same requests through both, with this machine's profile.

The model is a random-weight Llama of 97.5M parameters in bfloat16. Requests have a quarter of ShareGPT's lengths and
arrive as a Poisson process at 0.5 and 0.8 of the rate that `fcfs` sustains in the simulator. Each repeat profiles the
machine, simulates, and then runs the engine in real time in this process: requests enter between steps, as in the
server, and latencies count from the due time. Targets: mean normalized latency within 20 %, P95 within 30 %.

`speed` is the duration of the real steps relative to the profile. `corrected_error` uses a prediction whose
coefficients are multiplied by `speed`: on a shared machine the speed changes between profile and run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from random_model import prompt_of, scratch_model
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
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.workload import synthetic

RECIPES, LOADS = ("fcfs", "fastserve"), (0.5, 0.8)
KV_GIB, MAX_NUM_SEQS, MAX_TOKENS = 0.5, 32, 512
WORKLOAD = synthetic("sharegpt*0.25", "poisson")
FIELDS = ("normalized_latency_s.mean", "normalized_latency_s.p95", "ttft_s.mean", "tpot_s.mean", "batch_mean")


def start(folder: Path, recipe: str, profile: Path) -> Engine:
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
    """Run the jobs at their due times, and return their record and the duration of steps relative to `cost`."""
    loop = EngineLoop(engine)
    info = engine.info
    ended: list[RequestFacts] = []
    log = RequestLog(ended.append)
    taken_s = expected_s = 0.0
    begin = loop.clock()
    usage = EngineUsage(
        device_blocks=info.device_blocks, block_size=info.block_size, block_bytes=info.cpu_block_bytes, start=begin
    )
    left = deque(enumerate(jobs))
    while left or not loop.idle:
        while left and left[0][1].at <= loop.clock() - begin:
            number, job = left.popleft()
            prompt = prompt_of(number, job.prompt_tokens)
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
    first, _, second = field.partition(".")
    found: float = record[first][second] if second else record[first]
    return found


def capacity(system: System) -> float:
    """Return the requests per second that `fcfs` finishes when all are present at the start."""
    cell = Cell(replace(system, recipe="fcfs"), WORKLOAD, Extent(1e4, None, 0, 600))
    rate: float = run(cell)["throughput_rps"]
    return rate


def measure(folder: Path, args: argparse.Namespace) -> tuple[list[harness.Record], float]:
    """Return a row for each repeat, load and recipe, and the capacity of `fcfs`."""
    path = folder.parent / "profile.json"
    rows: list[harness.Record] = []
    full = 0.0
    for repeat in range(args.repeats):
        harness.run_skipjoin("profile", folder, "--seconds", args.profile_seconds, "--out", path)
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
                row: harness.Record = {"repeat": repeat, "load": load, "recipe": recipe, "rate_rps": load * full}
                row["speed"] = round(speed, 4)
                for field in FIELDS:
                    real = value(measured, field)
                    row[field] = {
                        "measured": real,
                        "predicted": value(predicted, field),
                        "error": round(value(predicted, field) / real - 1, 4),
                        "corrected_error": round(value(corrected, field) / real - 1, 4),
                    }
                rows.append(row)
                harness.show(row)
    return rows, full


def summarize_rows(rows: list[harness.Record]) -> list[harness.Record]:
    """Return the spread of the errors over the repeats."""
    summary = []
    for load in LOADS:
        for recipe in RECIPES:
            chosen = [row for row in rows if (row["load"], row["recipe"]) == (load, recipe)]
            line: harness.Record = {"load": load, "recipe": recipe, "speed": [row["speed"] for row in chosen]}
            for field in FIELDS:
                for kind in ("error", "corrected_error"):
                    line[f"{field} {kind}"] = harness.spread([row[field][kind] for row in chosen], 4)
            summary.append(line)
    return summary


def main() -> None:
    parser = harness.parser(__doc__, repeats=3)
    parser.add_argument("--duration", type=float, default=45.0, help="seconds of arrivals in a run")
    parser.add_argument("--profile-seconds", type=float, default=30.0)
    args = parser.parse_args()
    settings = {
        "lengths": "sharegpt*0.25",
        "duration_s": args.duration,
        "kv_gib": KV_GIB,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
    }
    record = harness.new_record(settings=settings)
    with scratch_model(torch.bfloat16) as folder:
        record["rows"], settings["capacity_rps"] = measure(folder, args)
    record["summary"] = summarize_rows(record["rows"])
    harness.show(record["summary"])
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
