"""Measure prefix caching in the simulator: hit rates, recomputation, waits of uncached requests, and dispatch rules.

`sizes` also uses Mooncake's conversation_trace.jsonl (with `hash_ids`) if the folder SKIPJOIN_TRACES has it.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from papers.recipes import SPELLED
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import Request
from skipjoin.policies import dispatch
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.dispatch import OWN_WEIGHT, PrefixAware
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import Run, run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.prefixes import PromptParts
from skipjoin.workload.traces import Trace, TraceRow, read_trace
from skipjoin.workload.workload import Replay, Workload, synthetic

Result = dict[str, Any]
MOONCAKE = "conversation_trace.jsonl"
WHOLE = Extent(None, None, 0)
PART = 64  # tokens of a block and of a named part of a conversation


def conversations(seed: int, requests: int, *, rate: float) -> Trace:
    """Generate conversations that begin with one of four system prompts of 256 tokens.

    They have 8 turns on average, 60 s apart. The prompt of a turn contains all previous turns and 150 more tokens on
    average; answers have 250 tokens on average.

    Args:
        rate: Conversations that begin per second.
    """
    draw = random.Random(seed)
    rows: list[TraceRow] = []
    start, conversation = 0.0, 0
    while len(rows) < 2 * requests:
        start, conversation = start + draw.expovariate(rate), conversation + 1
        group, at, tokens = draw.randrange(4), start, 256
        while True:
            tokens += 1 + int(draw.expovariate(1 / 150))
            output = 1 + min(1000, int(draw.expovariate(1 / 250)))
            rows.append(TraceRow(at, tokens, output, parts=PromptParts(_names(group, conversation, tokens), PART)))
            tokens += output
            at += draw.expovariate(1 / 60)
            if tokens > 16_000 or draw.random() < 1 / 8:
                break
    rows.sort(key=lambda row: row.arrival_s or 0.0)
    return Trace("conversations", tuple(rows[:requests]))


def _names(group: int, conversation: int, tokens: int) -> tuple[int, ...]:
    common = 256 // PART
    return tuple(index + 1000 * (group if index < common else 10 + conversation) for index in range(tokens // PART))


def system(recipe: str, blocks: int, block_size: int = PART, *, length: int = 20_000, cpu_gib: float = 0) -> System:
    """Return a GPU with `blocks` of KV; without a CPU pool, preempted requests are recomputed."""
    machine = Machine(hardware="a100-80gb", model="qwen3-8b", block_size=block_size, swap_gib=cpu_gib)
    (found,) = machine.systems(SPELLED[recipe])
    return replace(found, kv_blocks=blocks, max_model_len=length, max_num_batched_tokens=8192)


def traces() -> Iterator[tuple[Trace, int]]:
    yield conversations(0, 3000, rate=0.6), PART
    folder = os.environ.get("SKIPJOIN_TRACES")
    if folder and (Path(folder) / MOONCAKE).exists():
        yield read_trace(Path(folder) / MOONCAKE), 512
    else:
        harness.show(f"SKIPJOIN_TRACES has no {MOONCAKE}: it is left out")


def found(record: Result) -> Result:
    return {
        "finished": record["requests"]["finished"],
        "hit_rate": record["prefix"]["hit_rate"] if "prefix" in record else 0.0,
        "regained_tokens": record["prefix"]["regained_tokens"] if "prefix" in record else 0,
        "recomputed_tokens": record["kv"]["recomputed_tokens"],
        "ttft_mean_s": record["ttft_s"]["mean"],
        "jct_mean_s": record["jct_s"]["mean"],
        "kv_used_mean": record["kv"]["used_mean"],
        "kv_allocated_mean": record["kv"]["allocated_mean"],
    }


@contextmanager
def plain_lru() -> Iterator[None]:
    """Disable the retention of blocks that waiting requests will use."""
    with patch.object(KVLedger, "await_prefix", lambda ledger, request: None):
        yield


def sizes() -> Result:
    """Measure hit rates under `fcfs` by the size of the KV pool."""
    results: Result = {}
    for trace, block_size in traces():
        tokens = sum(row.prompt_tokens + row.output_tokens for row in trace.rows)
        unlimited = tokens // block_size + 2 * len(trace.rows)
        length = 2 * max(row.prompt_tokens + row.output_tokens for row in trace.rows)
        rows = []
        for share in (1.0, 0.1, 0.04, 0.02, 0.01, 0.005):
            blocks = int(unlimited * share)
            if blocks * block_size < length:
                continue
            record = run(Cell(system("fcfs", blocks, block_size, length=length), Replay(trace), WHOLE))
            rows.append({"share_of_all_tokens": share, "kv_blocks": blocks, **found(record)})
            harness.show(trace.name, rows[-1])
        results[trace.name] = {"requests": len(trace.rows), "simulated": rows}
    return results


def tiers() -> Result:
    """Measure hit rates with a CPU pool that receives evicted blocks, also under overload."""
    results: Result = {}
    for name, rate, pools in (("sizes", 0.6, (1017, 2034)), ("twice the load", 1.2, (800,))):
        trace = conversations(0, 1500, rate=rate)
        rows = []
        for recipe, blocks, cpu_gib in product(("fcfs", "fastserve"), pools, (0, 8, 64)):
            record = run(Cell(system(recipe, blocks, cpu_gib=cpu_gib), Replay(trace), WHOLE))
            use = {"recipe": recipe, "kv_blocks": blocks, "cpu_gib": cpu_gib, **found(record)}
            use["hit_rate_on_cpu"] = record["prefix"]["hit_on_cpu_tokens"] / record["prefix"]["queried_tokens"]
            use["saved_gb"] = record["prefix"]["saved_bytes"] / 1e9
            use["swapped_out_gb"] = record["kv"]["swapped_out_bytes"] / 1e9
            rows.append(use)
            harness.show(name, use)
        results[name] = {"simulated": rows}
    return results


def order() -> Result:
    """Compare the retention of blocks that waiting requests will use (`interest`) with plain LRU."""
    # Twice the capacity, so that hundreds of requests wait.
    trace = conversations(1, 2000, rate=2.5)
    rows = []
    for blocks in (800, 1200, 2400):
        cell = Cell(system("fcfs", blocks), Replay(trace), WHOLE)
        with plain_lru():
            lru = found(run(cell))
        rows.append({"kv_blocks": blocks, "lru": lru, "interest": found(run(cell))})
        harness.show(rows[-1])
    return {"simulated_overload": rows}


def recompute() -> Result:
    """Measure recomputation with and without caching, for conversations and for prompts without common prefixes.

    Without common prefixes a request can only find KV that it computed itself.
    """
    alone = synthetic("uniform:200-1500,50-400", "poisson").draw(6.0, None, 0, 600)
    rows = tuple(
        TraceRow(job.at, job.prompt_tokens, job.output_tokens, parts=PromptParts(_own(number, job.prompt_tokens), PART))
        for number, job in enumerate(alone)
    )
    results: Result = {}
    for trace, blocks in ((Trace("alone", rows), 400), (conversations(2, 1200, rate=1.0), 700)):
        for recipe in ("fastserve-recompute", "bros-recompute", "fcfs"):
            with_cache = system(recipe, blocks)
            cold = found(run(Cell(replace(with_cache, enable_prefix_caching=False), Replay(trace), WHOLE)))
            warm = found(run(Cell(with_cache, Replay(trace), WHOLE)))
            share = warm["recomputed_tokens"] / max(1, cold["recomputed_tokens"])
            results[f"{trace.name}, {recipe}"] = {"without": cold, "with": warm, "recomputed_share": round(share, 4)}
            harness.show(trace.name, recipe, results[f"{trace.name}, {recipe}"])
    return results


def _own(number: int, tokens: int) -> tuple[int, ...]:
    return tuple(1000 * number + index for index in range(tokens // PART))


def flood() -> Result:
    """Measure waits where 19 of 20 requests begin with 4,096 cached tokens and the others find nothing."""
    workload = synthetic("uniform:50-200,50-200", "poisson", ["name=cold,lengths=fixed:4096,100,share=0.05"], "4096:1")
    results: Result = {}
    for recipe in ("fcfs", "sarathi", "fastserve", "bros", "econoserve", "srpt"):
        for rate, caching in ((12.0, False), (12.0, True), (24.0, True)):
            chosen = replace(system(recipe, 4000), enable_prefix_caching=caching)
            whole = Run(Cell(chosen, workload, Extent(rate, 120.0, 0)))
            shard = whole.shard(0)
            name = f"{recipe}, {rate:g} req/s, {'with' if caching else 'without'} caching"
            results[name] = {
                stream: _waits([one for one in shard.facts if one.stream == stream], shard.end_s)
                for stream in ("cold", "default")
            }
            harness.show(name, results[name])
    return results


def _waits(facts: list[Any], end: float) -> Result:
    ttfts = [one.ttft(end) for one in facts]
    return {
        "requests": len(facts),
        "finished": sum(one.is_complete for one in facts),
        "ttft_mean_s": sum(ttfts) / len(ttfts),
        "ttft_max_s": max(ttfts),
        "queue_max_s": max(one.queue(end) or 0.0 for one in facts),
    }


def replicas() -> Result:
    """Compare dispatch rules over four replicas: conversations below and above capacity, and a shared system prompt."""
    fast = [row._replace(arrival_s=(row.arrival_s or 0.0) / 4) for row in conversations(0, 4000, rate=4.0).rows]
    system_prompt = synthetic("uniform:50-400,50-400", "poisson", [], "4096:1")
    loads: dict[str, tuple[Workload, Extent]] = {
        "conversations": (Replay(conversations(0, 2000, rate=2.4)), WHOLE),
        "conversations, overload": (Replay(Trace("fast", tuple(fast))), WHOLE),
        "one system prompt, 8 req/s": (system_prompt, Extent(8.0, 30.0, 0)),
        "one system prompt, 32 req/s": (system_prompt, Extent(32.0, 30.0, 0)),
    }
    rules = ("round-robin", 1.0), ("least-work", 1.0), *(("prefix-aware", weight) for weight in (OWN_WEIGHT, 1.0, 16.0))
    results: Result = {}
    for load, (workload, extent) in loads.items():
        for rule, weight in rules:
            chosen = replace(system("fcfs", 4000), replicas=4, dispatch=rule)
            with patch.object(dispatch, "OWN_WEIGHT", weight):
                record = run(Cell(chosen, workload, extent))
            name = f"{load}, {rule}" + (f", weight {weight:g}" if rule == "prefix-aware" else "")
            results[name] = found(record) | {"ttft_p99_s": record["ttft_s"]["p99"]}
            harness.show(name, results[name])
    return results


def routing_cost() -> Result:
    """Measure the processor time for choosing one of four replicas: hashing the prompt, and looking up its keys."""
    results: Result = {}
    for tokens in (1000, 10_000, 30_000, 100_000):
        rule = PrefixAware.learning()
        for replica in range(4):
            rule.join(replica, LinearCost(floor=0.01, prefill_token=1e-4, decode=2e-4), 20_000, 16)
        draw, times = random.Random(0), []
        for number in range(41):
            prompt = [draw.randrange(150_000) for _ in range(tokens)]
            for turn in range(2):  # the second turn finds the keys of the first
                request = Request(2 * number + turn, 0.0, prompt, 100, prefix=ContentPrefix(16))
                begun = process_time()
                rule.choose(request)
                times.append(1e3 * (process_time() - begun))
        new, known = times[::2], times[1::2]
        results[f"{tokens} tokens"] = {
            name: {f"{figure}_ms": value for figure, value in harness.spread(some, 5).items()}
            for name, some in (("new", new), ("known", known))
        }
        harness.show(tokens, results[f"{tokens} tokens"])
    return results


PARTS: dict[str, Callable[[], Result]] = {
    "sizes": sizes,
    "tiers": tiers,
    "order": order,
    "recompute": recompute,
    "flood": flood,
    "replicas": replicas,
    "routing_cost": routing_cost,
}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--parts", type=harness.some_of("parts", PARTS), default=list(PARTS), help="the file keeps its other parts"
    )
    args = parser.parse_args()
    record = harness.read_record(args.out) | harness.new_record()
    for part in args.parts:
        record[part] = PARTS[part]()
        harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
