"""Output tokens per second on this CPU: Skipjoin through LLM and over HTTP, and transformers, in one run.

    python benchmarks/engine_throughput/run.py [--repeats 5] [--ragged-repeats 2] [--out FILE]

A random-weight Llama of 97.5M parameters, greedy, end-of-sequence ignored. `even`: 16 requests of 64 + 64 tokens;
`ragged`: 32 requests, prompts of 8 to 512 and outputs of 8 to 256 tokens, which `generate` runs in padded batches of 16
and the other engines in batches of their own. The engines run in turns; printed are the median, least and greatest, and
the median of the ratios of each turn. `floor` is the rate at which reading the weights once per step of 16 tokens would
take the memory bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers import ContinuousBatching, Generate, Ours, OursOverHttp, memory_bandwidth
from rich.progress import Progress
from workload import BATCH, Job, even, ragged

from machine import describe_machine
from random_model import make_model

SETS: dict[str, Callable[[], list[Job]]] = {"even": even, "ragged": ragged}


def measure(dtype: torch.dtype, turns: dict[str, int], bars: Progress) -> dict[str, object]:
    """All engines on both sets, in turn."""
    folder = Path(tempfile.mkdtemp(prefix="skipjoin-bench-"))
    make_model(folder, dtype)
    ours, generate = Ours(folder), Generate(folder, dtype)
    engines = {
        "skipjoin LLM": ours,
        "skipjoin HTTP": OursOverHttp(folder),
        "transformers generate": generate,
        "transformers continuous batching": ContinuousBatching(generate),
    }
    record: dict[str, object] = {"dtype": str(dtype).removeprefix("torch.")}
    try:
        for runner in engines.values():  # code and memory touched for the first time
            runner.run(even())
        for name, make in SETS.items():
            jobs = make()
            tokens = sum(job.output for job in jobs)
            task = bars.add_task(f"{record['dtype']} {name}", total=turns[name] * len(engines))
            rates: dict[str, list[float]] = {engine: [] for engine in engines}
            for _ in range(turns[name]):
                for engine, runner in engines.items():
                    rates[engine].append(tokens / runner.run(jobs))
                    bars.advance(task)
            record[name] = summary(rates)
        bandwidth = memory_bandwidth()
        steps = bandwidth / ours.weight_bytes
        record["scheduling_share"] = round(ours.scheduling_share(even()), 4)
        record["floor"] = {
            "weight_bytes": ours.weight_bytes,
            "bandwidth_gb_s": round(bandwidth / 1e9, 1),
            "tokens_per_s": round(steps * BATCH, 1),
        }
    finally:
        for runner in engines.values():
            runner.close()
        shutil.rmtree(folder)
    return record


def summary(rates: dict[str, list[float]]) -> dict[str, object]:
    """Median and spread per engine, and the ratio to `generate` turn by turn."""
    base = rates["transformers generate"]
    result: dict[str, object] = {}
    for engine, values in rates.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        result[engine] = {
            "tokens_per_s": round(statistics.median(values), 1),
            "min": round(min(values), 1),
            "max": round(max(values), 1),
            "ratio_to_generate": round(statistics.median(ratios), 2),
        }
    pairs = zip(rates["skipjoin HTTP"], rates["skipjoin LLM"], strict=True)
    result["http_over_llm"] = round(statistics.median(http / llm for http, llm in pairs), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ragged-repeats", type=int, default=2)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with Progress(transient=True) as bars:
        turns = {"even": args.repeats, "ragged": args.ragged_repeats}
        records = [measure(getattr(torch, dtype), turns, bars) for dtype in args.dtypes]
    result = {"machine": describe_machine(), "turns": turns, "results": records}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
