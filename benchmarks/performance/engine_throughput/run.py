"""Measure tokens per second on this CPU: Skipjoin through `LLM` and over HTTP, and other engines, in one run.

The model has random weights and one of the shapes of random_model.py. All requests of a set are sent at once, decode
greedily and ignore end-of-sequence. Sets, as requests x (prompt + output tokens): `even` 16 x (64 + 64), `one` 1 x (64
+ 128), `wide` 64 x (64 + 64), `ragged` 32 x (8 to 512 + 8 to 256), `prefill` 16 x (900 + 1), `long` 16 x (700 + 128).
Rates count output tokens, in `prefill` prompt tokens.

Each peer runs in its own environment (`peer_venvs.py`), which is created on first use. A peer that cannot be installed
is left out, and the record says why. vLLM and llama.cpp are measured over HTTP, as Skipjoin is. vLLM compiles its
model; `vllm-eager` does not. Skipjoin and vLLM have KV pools of the same size, and all KV is written once before the
first turn: page faults of untouched memory take a tenth of a prompt's time. The engines take turns, each turn with new
prompts. Engines whose names begin with one of `--once` run in the first turn only, because they may take minutes.
`ratios` are medians over turns. `floor` is the rate at which reading the weights once per step of 16 tokens takes the
memory bandwidth measured in the same run. The record is written after every set.

To measure as on a processor with AVX2 only, set CXX="g++ -mno-avx512f" ATEN_CPU_CAPABILITY=avx2
ONEDNN_MAX_CPU_ISA=AVX2. The record has these limits and the path that Skipjoin runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from peers import Ours, engines
from rich.progress import Progress

import harness
from bandwidth import memory_bandwidth
from peer_venvs import PEERS, names_of
from random_model import add_shape, scratch_model
from skipjoin.model.ops.build import load_library, path_of
from workload import SETS, kv_gib_of

OURS = ("skipjoin LLM", "skipjoin HTTP")
# Seconds between two engines. Threads of the previous one may still spin, vLLM's for about a second.
PAUSE_S = 1.5
FLOOR_BATCH = 16
Figures = dict[str, Any]


def measure(dtype: torch.dtype, args: argparse.Namespace, bars: Progress, keep: Callable[[Figures], None]) -> Figures:
    """Measure all engines on all sets in turn; `keep` receives the record after each set."""
    name = str(dtype).removeprefix("torch.")
    kv_gib = kv_gib_of(args.shape, dtype)
    with (
        scratch_model(dtype, args.shape, awq=args.awq) as folder,
        engines(folder, name, args.peers, kv_gib) as (found, missing),
    ):
        packages = {peer: PEERS[peer.removesuffix("-eager")].installed for peer in args.peers}
        library = load_library()
        path = "torch" if library is None else path_of(library)
        record: Figures = {
            "shape": args.shape,
            "weights": "awq" if args.awq else name,
            "kv_gib": kv_gib,
            "dtype": name,
            "path": path,
            "packages": packages,
            "missing": missing,
            "sets": {},
        }
        task = bars.add_task(f"{name}: warm-up", total=len(found))
        for engine in found.values():
            engine.run(engine.warm_up(-1))
            bars.advance(task)
        for label in args.sets:
            work = SETS[label]
            task = bars.add_task(f"{name} {label}", total=args.repeats * len(found))
            rates: dict[str, list[float]] = {engine: [] for engine in found}
            loads = []
            for turn in range(args.repeats):
                for engine, runner in found.items():
                    if turn == 0 or not engine.startswith(tuple(args.once)):
                        time.sleep(PAUSE_S)
                        rates[engine].append(work.tokens / runner.run(work.jobs(turn)))
                        loads.append(os.getloadavg()[0])
                    bars.advance(task)
            record["sets"][label] = summary(rates) | {"load_1min": round(statistics.median(loads), 1)}
            harness.show(label, record["sets"][label])
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
    """Return the spread per engine and Skipjoin's ratios to the others, turn by turn."""
    result: Figures = {}
    for engine, values in rates.items():
        found = harness.spread(values, 1)
        result[engine] = {"tokens_per_s": found["median"], "min": found["min"], "max": found["max"]}
        result[engine]["turns"] = len(values)
    pairs = [(ours, other) for ours in OURS for other in rates if other not in OURS]
    result["ratios"] = {
        f"{ours} / {other}": harness.median_ratio(rates[ours], rates[other])
        for ours, other in (*pairs, ("skipjoin HTTP", "skipjoin LLM"))
    }
    return result


def main() -> None:
    parser = harness.parser(__doc__, repeats=3)
    parser.add_argument("--peers", type=names_of, default=["transformers"])
    parser.add_argument("--sets", type=harness.some_of("sets", SETS), default=[*SETS])
    parser.add_argument("--once", type=harness.words, default=[], help="engines that run in the first turn only")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--awq", action="store_true", help="weights of layers in AWQ's 4 bits")
    add_shape(parser)
    args = parser.parse_args()
    result = harness.new_record(turns=args.repeats, results=[])

    def keep(*more: Figures) -> None:
        harness.write_record(result | {"results": [*result["results"], *more]}, args.out)

    with Progress(transient=True) as bars:
        for dtype in args.dtypes:
            result["results"].append(measure(getattr(torch, dtype), args, bars, keep))
    harness.report(result, args.out)


if __name__ == "__main__":
    main()
