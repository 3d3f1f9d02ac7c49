"""Compare capacities with a KV cache of 8 bits and one of the model's type in as much memory, over HTTP.

The model is that of `run.py` in bfloat16, under `fcfs`. Requests have half of ShareGPT's lengths, and 0.1 GiB of KV
limits the batch. Servers with both types run at the same time and get the same bursts in turns, in alternating order.
The capacity is the number of requests finished per second of a burst.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from run import load

import harness
from random_model import scratch_model
from servers import Skipjoin
from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV

TYPES = ("auto", "int8")
# Half of ShareGPT's lengths: means of 79 prompt and 166 output tokens.
LENGTHS, BURST = "sharegpt*0.5", 48
KV_GIB, BLOCK, MAX_SEQS, MAX_TOKENS = 0.1, 16, 64, 512
FIELDS = ("throughput_rps", "throughput_tps")


def burst(server: Skipjoin, seed: int) -> dict[str, float]:
    """Send a burst, and return requests and tokens per second."""
    (record,) = load(server, "--lengths", LENGTHS, "--rates", 1000, "--requests", BURST, "--seeds", seed, "--warmup", 2)
    if record["requests"]["finished"] != BURST:
        raise RuntimeError(f"{record['requests']} of {BURST} requests")
    return {name: record[name] for name in FIELDS}


def main() -> None:
    args = harness.parser(__doc__, repeats=3).parse_args()
    settings = {"lengths": LENGTHS, "requests": BURST, "kv_gib": KV_GIB, "max_num_seqs": MAX_SEQS}
    record = harness.new_record(settings=settings)
    limits = ("--recipe", "fcfs", "--kv-cache-gib", KV_GIB, "--swap-space", 0, "--max-num-seqs", MAX_SEQS)
    limits += ("--max-num-batched-tokens", MAX_TOKENS, "--block-size", BLOCK)
    turns: dict[str, list[dict[str, Any]]] = {kind: [] for kind in TYPES}
    with scratch_model(torch.bfloat16) as folder, ExitStack() as stack:
        config = ModelConfig.from_folder(folder)
        record["blocks"] = {
            kind: int(KV_GIB * 2**30) // PagedKV.bytes_per_block(config, BLOCK, torch.bfloat16, of=CACHE_FORMATS[kind])
            for kind in TYPES
        }
        servers = {kind: stack.enter_context(Skipjoin(folder, "--kv-cache-dtype", kind, *limits)) for kind in TYPES}
        for turn in range(args.repeats):
            for kind in harness.in_turn(TYPES, turn):
                turns[kind].append(burst(servers[kind], turn))
                harness.show(kind, turns[kind][-1])
        record["preemptions"] = {kind: server.metric("num_preemptions_total") for kind, server in servers.items()}
    record["turns"] = turns
    record["ratio"] = harness.median_ratio(
        *([one["throughput_rps"] for one in turns[kind]] for kind in ("int8", "auto"))
    )
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
