"""Compare vLLM's own scheduler with Skipjoin's schedulers inside vLLM, on the CPU backend.

The model has 97.5M random weights in bfloat16 and runs without compilation on one thread. vLLM is installed into an
environment of its own on first use. In each part all schedulers run in one process and take turns step by step; the
clock of each is the CPU time of its own steps.

- `burst`: requests that arrive together; throughput, number of steps and order of ends of `fcfs` against stock.
- `cost`: `schedule` and `update_from_output` with 128 running requests and 1,000 or 100,000 waiting ones, no model.
  The schedulers' clock advances by the time that a step would take.
- `load`: 8 slots, 80 % short and 20 % long outputs, at 1.5 times the rate that a full batch serves.
- `prompts`: 85 % prompts of 64 tokens and 15 % of 1,500, with 16 to 32 output tokens, at 1.2 times that rate.
- `sharegpt`: ShareGPT lengths at a quarter, at 0.8, 1.0 and 1.2 times that rate; also stock with `priority`, by whether
  an output is short, and `sarathi`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from skipjoin.recipes import DEFAULT

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from peer_venvs import python_of
from random_model import scratch_model

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(harness.ROOT / "src"),
}
SHAREGPT = "sharegpt*0.25"
LOADS = (0.8, 1.0, 1.2)
PARTS = ("burst", "cost", "load", "prompts", "sharegpt")


def measure(python: Path, part: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    command = [python, Path(__file__).with_name("lanes.py"), part, json.dumps(settings)]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True, timeout=3600
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def over_seeds(python: Path, seeds: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a load with several seeds, and return the spread of each figure of each scheduler."""
    runs = [measure(python, "load", {**settings, "seed": seed}) for seed in range(seeds)]
    for run in runs:
        harness.show(run)
    names: Sequence[str] = settings["schedulers"]
    return {
        "requests": [run["requests"] for run in runs],
        "capacity_per_s": harness.spread([run["capacity_per_s"] for run in runs]),
        **{name: harness.spreads([run[name] for run in runs], 4) for name in names},
    }


def main() -> None:
    parser = harness.parser(__doc__, seconds=60, seeds=3, requests=32, repeats=6, steps=360)
    parser.add_argument("--parts", type=harness.some_of("parts", PARTS), default=[*PARTS])
    args = parser.parse_args()
    python = python_of("vllm")
    record = harness.new_record(model="97.5M parameters, bfloat16, one thread", parts={})
    parts = record["parts"]
    with scratch_model(torch.bfloat16, max_position_embeddings=2048) as model:
        base = {"model": str(model), "seed": 0}
        if "burst" in args.parts:
            parts["burst"] = measure(python, "burst", {**base, "repeats": args.repeats, "requests": args.requests})
        for waiting in (1_000, 100_000) if "cost" in args.parts else ():
            settings = {**base, "waiting": waiting, "steps": args.steps, "recipes": ["fcfs", "fastserve", DEFAULT]}
            parts[f"cost_{waiting}_waiting"] = measure(python, "cost", settings)
        common = {**base, "seconds": args.seconds, "blocks": None}
        if "load" in args.parts:
            settings = {**common, "lengths": "mixed", "load": 1.5, "schedulers": ["stock", "fastserve", DEFAULT]}
            parts["load"] = over_seeds(python, args.seeds, settings)
        if "prompts" in args.parts:
            settings = {**common, "lengths": "prompts", "load": 1.2, "schedulers": ["stock", "fastserve", DEFAULT]}
            parts["prompts"] = over_seeds(python, args.seeds, settings)
        for load in LOADS if "sharegpt" in args.parts else ():
            schedulers = ["stock", "stock-priority", "sarathi", "fastserve", DEFAULT]
            settings = {**common, "lengths": SHAREGPT, "load": load, "schedulers": schedulers}
            parts[f"sharegpt_{load}"] = over_seeds(python, args.seeds, settings)
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
