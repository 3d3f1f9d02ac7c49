"""Thousands of replicas in one command: its time, its memory, and whether 20 replicas tell the same.

    python benchmarks/performance/many_replicas/run.py [--replicas 4000] [--recipe fcfs] [--jobs 2] [--out FILE]

OPT-13B on one A100-80GB for each replica, ShareGPT lengths, Poisson arrivals for 60 s, every request to its end. `many`
is `skipjoin simulate` with all replicas; wanted within 10 minutes and 8 GB. `few` are 20 replicas at their part of the
rate, with ten seeds, because the mean of one is off by several percent by chance; wanted: mean figures within 3 %. The
pool is large enough that no request waits for KV: such waits are rare and long, and their mean over few requests is
chance.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine

FEW, SEEDS = 20, "0-9"
RATE_RPS = 3.0  # of a replica
COMMON = "--model opt-13b --hardware a100-80gb --lengths sharegpt --duration 60"
MEANS = ("normalized_latency_s", "ttft_s", "tpot_s", "jct_s")
LONGEST_S, MOST_GB, NEAR = 600, 8.0, 0.03


def simulate(options: str) -> dict[str, Any]:
    """Run the command; its seconds, those of the processors, the most memory that its processes had at one time, and
    its records."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.json"
        command = [str(Path(sys.executable).parent / "skipjoin"), "simulate", *options.split(), "--out", str(out)]
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
    """Seconds of processors that commands have taken which are over."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory_of(pid: int) -> int:
    """Bytes that a process and those that it started have to themselves, shared ones divided."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return sum(process.memory_full_info().pss for process in processes)
    except psutil.NoSuchProcess:  # it ended meanwhile
        return 0


def figures(record: dict[str, Any]) -> dict[str, float]:
    """The mean figures of a record, for each replica where they add up."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4000)
    parser.add_argument("--recipe", default="fcfs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    common = f"{COMMON} --recipes {args.recipe} --jobs {args.jobs}"
    few = simulate(f"{common} --replicas {FEW} --rates {RATE_RPS * FEW:g} --seeds {SEEDS}")
    options = f"{common} --replicas {args.replicas} --rates {RATE_RPS * args.replicas:g}"
    many = simulate(options)
    (whole,) = many["records"]
    parts = [figures(record) for record in few["records"]]
    scaled = {name: fmean(part[name] for part in parts) for name in parts[0]}
    ratios = {name: round(value / scaled[name], 4) for name, value in figures(whole).items()}
    record = {
        "machine": describe_machine(),
        "command": f"skipjoin simulate {options}",
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
            "time": many["seconds"] <= LONGEST_S,
            "memory": many["peak_gb"] <= MOST_GB,
            "means": all(abs(ratio - 1) <= NEAR for ratio in ratios.values()),
        },
    }
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
