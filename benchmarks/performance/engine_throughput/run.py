"""Tokens per second on this CPU: Skipjoin through LLM and over HTTP, and other engines, in one run.

    python benchmarks/performance/engine_throughput/run.py [--peers vllm,transformers,llamacpp] [--repeats 3]
        [--once transformers] [--sets even,long] [--dtypes bfloat16] [--out FILE]

A random-weight Llama of 97.5M parameters, greedy, end-of-sequence ignored, all requests at once. Sets, in tokens of
prompt and output: `even` 16 x (64 + 64), `one` 1 x (64 + 128), `wide` 64 x (64 + 64), `ragged` 32 x (8 to 512 + 8 to
256), `prefill` 16 x (900 + 1), `long` 16 x (700 + 128). Rates are of output tokens, in `prefill` of prompt tokens.

Each peer runs in an environment of its own (`peer_venvs.py`), which is made on first use; one that cannot be had is
left out, and the record says why. vLLM and llama.cpp are loaded over HTTP as Skipjoin is. vLLM compiles its model;
`vllm-eager` is vLLM without. Skipjoin and vLLM have as much KV, and all of it was in use before the first turn: on
memory that was never written the system spends a tenth of a prompt's time. The engines run in turns, each turn with new
prompts; those whose names begin with one of `--once`, since they may take minutes, in the first turn only. Printed are
the median, least and greatest rates, and the median of each turn's ratios of Skipjoin's rates to those of the others.
`floor` is the rate at which reading the weights once per step of 16 tokens would take the memory bandwidth measured in
the same run. The result is written after every set.

As on a processor that has AVX2 alone: CXX="g++ -mno-avx512f" ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 before
the command. The record says so, and which of its paths Skipjoin runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from peers import Ours, engines
from rich.progress import Progress

from bandwidth import memory_bandwidth
from machine import describe_machine
from peer_venvs import PEERS, names_of
from random_model import make_model
from skipjoin.model.ops.build import load_library, path_of
from workload import KV_GIB, SETS

OURS = ("skipjoin LLM", "skipjoin HTTP")
# Seconds between two engines: threads of the one before may still wait for work on the processor, vLLM's for about one.
PAUSE_S = 1.5
FLOOR_BATCH = 16
Figures = dict[str, Any]


def measure(dtype: torch.dtype, args: argparse.Namespace, bars: Progress, keep: Callable[[Figures], None]) -> Figures:
    """All engines on all sets, in turn. keep: gets the record after each set."""
    name = str(dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        folder = Path(scratch) / "model"
        make_model(folder, dtype)
        with engines(folder, name, args.peers) as (found, missing):
            packages = {peer: PEERS[peer.removesuffix("-eager")].installed for peer in args.peers}
            library = load_library()
            path = "torch" if library is None else path_of(library)
            record: Figures = {"dtype": name, "path": path, "packages": packages, "missing": missing, "sets": {}}
            task = bars.add_task(f"{name}: all KV in use once", total=len(found))
            for engine in found.values():
                engine.run(engine.warm_up(-1))
                bars.advance(task)
            for label in args.sets:
                work = SETS[label]
                task = bars.add_task(f"{name} {label}", total=args.repeats * len(found))
                once = tuple(name for name in args.once.split(",") if name)
                rates: dict[str, list[float]] = {engine: [] for engine in found}
                loads = []
                for turn in range(args.repeats):
                    for engine, runner in found.items():
                        if turn == 0 or not engine.startswith(once):
                            time.sleep(PAUSE_S)
                            rates[engine].append(work.tokens / runner.run(work.jobs(turn)))
                            loads.append(os.getloadavg()[0])
                        bars.advance(task)
                record["sets"][label] = summary(rates) | {"load_1min": round(statistics.median(loads), 1)}
                print(label, json.dumps(record["sets"][label]), flush=True)
                keep(record)
            ours = found["skipjoin LLM"]
            assert isinstance(ours, Ours)
            bandwidth = memory_bandwidth()
            record["scheduling_share"] = round(ours.scheduling_share(SETS["even"].jobs(-2)), 4)
            record["floor"] = {
                "weight_bytes": ours.weight_bytes,
                "bandwidth_gb_s": round(bandwidth / 1e9, 1),
                "tokens_per_s": round(bandwidth / ours.weight_bytes * FLOOR_BATCH, 1),
            }
    return record


def summary(rates: dict[str, list[float]]) -> Figures:
    """Median and spread per engine, and Skipjoin's ratios to the others turn by turn."""
    result: Figures = {}
    for engine, values in rates.items():
        result[engine] = {
            "tokens_per_s": round(statistics.median(values), 1),
            "min": round(min(values), 1),
            "max": round(max(values), 1),
            "turns": len(values),
        }
    result["ratios"] = {
        f"{ours} / {other}": ratio(rates[ours], rates[other]) for ours in OURS for other in rates if other not in OURS
    }
    result["ratios"]["skipjoin HTTP / skipjoin LLM"] = ratio(rates["skipjoin HTTP"], rates["skipjoin LLM"])
    return result


def ratio(ours: list[float], others: list[float]) -> float:
    """The median of the ratios of each turn that both have."""
    return round(statistics.median(one / other for one, other in zip(ours, others, strict=False)), 3)


def sets_of(text: str) -> list[str]:
    """Sets from a comma-separated list, for argparse."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in SETS]:
        raise argparse.ArgumentTypeError(f"sets must be of {', '.join(SETS)}, got {', '.join(unknown)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=names_of, default=["transformers"])
    parser.add_argument("--sets", type=sets_of, default=[*SETS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", default="", help="names of engines, separated by commas")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: Figures = {"machine": describe_machine(), "turns": args.repeats, "kv_gib": KV_GIB, "results": []}

    def keep(*more: Figures) -> None:
        if args.out:
            args.out.write_text(json.dumps(result | {"results": [*result["results"], *more]}, indent=1) + "\n")

    with Progress(transient=True) as bars:
        for dtype in args.dtypes:
            result["results"].append(measure(getattr(torch, dtype), args, bars, keep))
    print(json.dumps(result, indent=1))
    keep()


if __name__ == "__main__":
    main()
