"""Measure the host time of a decode step, which on a GPU must overlap with the previous step.

    python benchmarks/performance/host_step/run.py [--out FILE]

The benchmark runs the engine core with its scheduler, a `Worker` and decode graphs, two plans deep, on one thread. The
model takes no time: a function that returns fixed logits of a small vocabulary replaces the recorded graph. Launches
are not counted; on a GPU a step adds one of the graph, one copy each way and a few for sampling. Requests decode
greedily at contexts of 1,024 tokens, with block tables for up to 131,072 tokens. On a GPU two threads of one
interpreter do this work, so the sum must be shorter than a step.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.exec.graphs import DecodeGraphs, Run, graph_batch_sizes
from skipjoin.exec.rank_spec import make_store
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.worker import InFlightStep, Worker
from skipjoin.model.loader import random_model
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import Settings, build, own
from skipjoin.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness

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


class FixedGraphs:
    """Graph recorder that replays the first result of a function."""

    def record(self, run: Run) -> Run:
        result = run()
        return lambda: result


def measure(recipe: str, batch: int) -> dict[str, float]:
    """Return the median microseconds of each part of a step and of their sum."""
    blocks = batch * (CONTEXT // BLOCK_SIZE + 20)
    # Graphs write padding to slot -1, which this attention takes for a slot of the last block: hence one more block.
    model = random_model(CONFIG, attention="torch")
    store = make_store(model, blocks + 1, 0, BLOCK_SIZE)
    graphs = DecodeGraphs(model, store.device, FixedGraphs(), sizes=graph_batch_sizes(batch), longest=LONGEST)
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
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--recipes", nargs="*", default=["fcfs", "fastserve"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    record = harness.new_record(context=CONTEXT, longest=LONGEST, steps=STEPS, rows=[])
    for recipe in args.recipes:
        for batch in BATCHES:
            found = harness.spreads([measure(recipe, batch) for _ in range(args.repeats)], 1)
            record["rows"].append({"recipe": recipe, "batch": batch} | found)
            harness.show(recipe, batch, {name: one["median"] for name, one in found.items()})
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
