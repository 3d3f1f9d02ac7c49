"""Host time of a decode step, which on a GPU must be overlapped with the previous step: scheduling, queueing, reading.

    python benchmarks/performance/host_step/run.py [--out FILE]

The engine core with its scheduler, a `Worker` and decode graphs, two plans deep, on one thread; the model takes no
time: a function that returns fixed logits of a small vocabulary replaces the recorded graph. No launch is counted: on a
GPU a step adds one of the graph, one copy each way and a handful for sampling. Requests decode greedily at contexts of
1,024 tokens, with block tables for up to 131,072. On a GPU two threads of one interpreter do this work, so the sum must
be shorter than a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.scheduling.scheduler import Scheduler
from skipjoin.exec.graphs import DecodeGraphs, Run, graph_batch_sizes
from skipjoin.exec.rank_spec import make_store
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.worker import InFlightStep, Worker
from skipjoin.model.loader import random_model
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import Settings, build, own
from skipjoin.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine

BATCHES = (1, 16, 64, 256)
CONTEXT, LONGEST, BLOCK_SIZE = 1024, 131072, 16
STEPS, WARM_UP = 150, 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": LONGEST,
}


class Nothing:
    """Records a function as what returns its first result."""

    def record(self, run: Run) -> Run:
        result = run()
        return lambda: result


def measure(recipe: str, batch: int) -> dict[str, float]:
    """Median microseconds of each part of a step, and of their sum."""
    blocks = batch * (CONTEXT // BLOCK_SIZE + 20)
    # Slot -1 is nowhere to the attention that graphs are for; to this one, which runs once, it is the last block's.
    model = random_model(CONFIG, attention="torch")
    store = make_store(model, blocks + 1, 0, BLOCK_SIZE)
    graphs = DecodeGraphs(model, store.device, Nothing(), sizes=graph_batch_sizes(batch), longest=LONGEST)
    worker = Worker(model, store, graphs=graphs)
    cost = LinearCost(floor=0.004, prefill_token=1e-5, decode=1e-5, context_token=1e-9)
    settings = Settings(cost, max_seqs=batch, max_tokens=1 << 20)
    policies = build(recipe, settings, own(recipe, {"starvation_s": 1e9}))
    core = EngineCore(Scheduler(policies, KVLedger(blocks, 0, BLOCK_SIZE), depth=2, overlap=True))
    sampling = Sampling(SamplingParams(temperature=0, max_tokens=STEPS + 50), 0, ())
    for number in range(batch):
        core.add(Request(number, 0.0, [number] * CONTEXT, STEPS + 50, sampling=sampling), 0.0)
    times: dict[str, list[float]] = {"decide": [], "begin": [], "finish": [], "settle": []}
    begun: deque[InFlightStep] = deque()
    for step in range(WARM_UP + STEPS):
        now = step * 0.004
        while len(begun) < 2:
            plan = _timed(times["decide"], core.start_step, now)
            begun.append(_timed(times["begin"], worker.begin, plan))
        result = _timed(times["finish"], worker.finish, begun.popleft())
        _timed(times["settle"], core.finish_step, result, now)
        core.take_events()
    medians = {f"{name}_us": statistics.median(each[-STEPS:]) * 1e6 for name, each in times.items()}
    return medians | {"sum_us": sum(medians.values())}


def _timed(times: list[float], do: Callable[..., Any], *args: object) -> Any:
    start = time.perf_counter()
    done = do(*args)
    times.append(time.perf_counter() - start)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recipes", nargs="*", default=["fcfs", "fastserve"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    rows = []
    for recipe in args.recipes:
        for batch in BATCHES:
            runs = [measure(recipe, batch) for _ in range(args.repeats)]
            row: dict[str, object] = {"recipe": recipe, "batch": batch}
            for name in runs[0]:
                values = [run[name] for run in runs]
                row[name] = {
                    "median": round(statistics.median(values), 1),
                    "min": round(min(values), 1),
                    "max": round(max(values), 1),
                }
            rows.append(row)
            print(
                recipe, batch, {name: one["median"] for name, one in row.items() if isinstance(one, dict)}, flush=True
            )
    if args.out:
        record = {"machine": describe_machine(), "context": CONTEXT, "longest": LONGEST, "steps": STEPS, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
