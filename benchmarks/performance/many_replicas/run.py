"""Measure `skipjoin simulate` with thousands of replicas, and compare its means with those of 20 replicas.

    python benchmarks/performance/many_replicas/run.py [--replicas 4000] [--recipe fcfs] [--jobs 2] [--out FILE]

Each replica is OPT-13B on one A100-80GB. Requests have ShareGPT lengths, arrive as a Poisson process for 60 s and all
finish. `many` is one run with all replicas; the targets are 10 minutes and 8 GB. `few` is 20 replicas at their share of
the rate, with ten seeds because the mean of one seed varies by several percent; the target is a difference of at most 3
%. The pool is large enough that no request waits for KV: such waits are rare and long, so their mean varies much.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness

FEW, SEEDS = 20, "0-9"
RATE_RPS = 3.0  # of a replica
COMMON = "--model opt-13b --hardware a100-80gb --lengths sharegpt --duration 60"
MEANS = ("normalized_latency_s", "ttft_s", "tpot_s", "jct_s")
MAX_S, MAX_GB, TOLERANCE = 600, 8.0, 0.03


def simulate(options: str) -> dict[str, Any]:
    """Run the command and return its wall time, processor time, peak memory and records."""
    with harness.scratch() as folder:
        out = folder / "records.json"
        command = [str(harness.SKIPJOIN), "simulate", *options.split(), "--out", str(out)]
        begun, before, peak = time.perf_counter(), processor_s(), 0
        process = subprocess.Popen(command)
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(1.0)
        if process.returncode:
            raise SystemExit(process.returncode)
        return {
            "seconds": round(time.perf_counter() - begun, 1),
            "cpu_seconds": round(processor_s() - before, 1),
            "peak_gb": round(peak / 1e9, 2),
            "records": json.loads(out.read_text()),
        }


def processor_s() -> float:
    """Return the processor time of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory_of(pid: int) -> int:
    """Return the proportional set size of a process and its descendants in bytes."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return sum(process.memory_full_info().pss for process in processes)
    except psutil.NoSuchProcess:  # a process has exited
        return 0


def figures(record: dict[str, Any]) -> dict[str, float]:
    """Return the mean figures of a record, with counts divided by the number of replicas."""
    replicas = record["settings"]["replicas"]
    tokens = record["throughput_tps"] * record["duration_s"]
    return {
        **{name: record[name]["mean"] for name in MEANS},
        "execution_s": record["breakdown_s"]["execution"],
        "queueing_s": record["breakdown_s"]["queueing"],
        "kv_used": record["kv"]["used_mean"],
        "kv_allocated": record["kv"]["allocated_mean"],
        "batch": record["batch_mean"],
        "requests": record["requests"]["finished"] / replicas,
        "tokens": tokens / replicas,
    }


def main() -> None:
    parser = harness.parser(__doc__, replicas=4000, jobs=2)
    parser.add_argument("--recipe", default="fcfs")
    args = parser.parse_args()
    record = harness.new_record()
    common = f"{COMMON} --recipes {args.recipe} --jobs {args.jobs}"
    few = simulate(f"{common} --replicas {FEW} --rates {RATE_RPS * FEW:g} --seeds {SEEDS}")
    options = f"{common} --replicas {args.replicas} --rates {RATE_RPS * args.replicas:g}"
    many = simulate(options)
    (whole,) = many["records"]
    parts = [figures(record) for record in few["records"]]
    scaled = {name: fmean(part[name] for part in parts) for name in parts[0]}
    ratios = {name: round(value / scaled[name], 4) for name, value in figures(whole).items()}
    record |= {
        "simulated": f"skipjoin simulate {options}",
        "seconds": many["seconds"],
        "cpu_seconds": many["cpu_seconds"],
        "peak_gb": many["peak_gb"],
        "requests": whole["requests"],
        "steps": whole["steps"],
        "many": figures(whole),
        "few": scaled,
        "few_by_seed": {name: [part[name] for part in parts] for name in MEANS},
        "ratios": ratios,
        "met": {
            "time": many["seconds"] <= MAX_S,
            "memory": many["peak_gb"] <= MAX_GB,
            "means": all(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values()),
        },
    }
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
