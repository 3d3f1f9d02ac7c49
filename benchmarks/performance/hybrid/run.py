"""Compare models whose requests have a state of constant size with dense ones: what preemption moves, and what it buys.

`pause` swaps a request of 4,096 tokens out and in, for published shapes without their weights, and compares the bytes
with those of dense models of similar size; `ratio` is relative to each of them. `engine` runs all requests of a burst
with `fcfs` and `fastserve` in turn, on a random-weight LFM2 and a Llama of the same width and depth in KV pools of the
same size: latencies, preemptions, and swapped bytes. `simulated` does so at a GPU's costs with the published shapes,
also in a pool that is as small for the hybrid as the other one is for the dense model.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from skipjoin.config import EngineConfig
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Move, StateSizes
from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.exec.kv_store import KVStore
from skipjoin.model.config import ModelConfig
from skipjoin.model.state_cache import StateCache
from skipjoin.observe.record import summarize
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.usage import EngineUsage
from skipjoin.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from random_model import prompt_of, write_words

TOKENS, BLOCK = 4096, 16
_LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192, "vocab_size": 65536}
# Published shapes, as far as they decide the size of KV and states.
HYBRID: dict[str, dict[str, Any]] = {
    "LFM2-1.2B": {
        **{"architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "max_position_embeddings": 128000},
        **{"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 12288},
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "Granite-4.0-H-Micro": {
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "vocab_size": 100352, "max_position_embeddings": 131072},
        **{"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 8192, "num_local_experts": 0, "mamba_n_heads": 64, "mamba_d_state": 128},
        "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
    },
}
DENSE: dict[str, dict[str, Any]] = {
    "SmolLM2-1.7B": _LLAMA
    | {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "intermediate_size": 8192},
    "Qwen3-1.7B": _LLAMA
    | {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144}
    | {"num_key_value_heads": 8, "head_dim": 128},
    "Qwen3-4B": _LLAMA
    | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
    | {"num_key_value_heads": 8, "head_dim": 128},
}
_SMALL = {"vocab_size": 8192, "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 10}
_SMALL |= {"intermediate_size": 1024, "max_position_embeddings": 1024, "eos_token_id": 2}
SERVED: dict[str, dict[str, Any]] = {
    "dense": _SMALL | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8},
    "hybrid": _SMALL
    | {"architectures": ["Lfm2ForCausalLM"], "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8]}
    | {"block_auto_adjust_ff_dim": False},
}
PARTS = "pause", "simulated", "engine"
KV_MIB, SWAP_GIB, SEQS = 48, 1.0, 8
# Model, GiB of KV, and requests per second on an A100.
SIMULATED = (("qwen3-1.7b", 2, 60), ("lfm2-1.2b", 2, 60), ("lfm2-1.2b", 0.2, 60))


def pause(config: dict[str, Any]) -> harness.Record:
    """Move a request out and in, and return bytes per direction and seconds."""
    model, dtype = ModelConfig.from_dict(config), torch.bfloat16
    blocks, state_bytes = TOKENS // BLOCK, StateCache.bytes_per_slot(model, dtype)
    states = StateSizes("state", 1, 1) if state_bytes else None
    store = KVStore(
        model, dtype, torch.device("cpu"), device_blocks=blocks, cpu_blocks=blocks, block_size=BLOCK, states=states
    )
    ledger, request = KVLedger(blocks, blocks, BLOCK, states=states), Request(0, 0.0, range(TOKENS), 1)
    store.device.tensor.view(torch.uint8).fill_(1)
    ledger.grow(request, TOKENS)
    request.progress.begin(TOKENS, True, 0)
    request.progress.settle(TOKENS, True)
    seconds, moved = [], set[int]()
    for _ in range(4):  # the first touches the memory
        for is_out in (True, False):
            tiers = ledger.tiers
            move = tiers.move_out(request, blocking=True) if is_out else tiers.move_in(request)
            assert move is not None
            seconds.append(harness.seconds_of(lambda move=move: store.copy(move)))
            moved.add(_bytes(move, store.device.block_bytes, state_bytes))
            ledger.tiers.complete(move)
    (found,) = moved
    return {
        "bytes": found,
        "state_bytes": state_bytes,
        "kv_bytes_per_token": store.device.block_bytes // BLOCK,
        "seconds": harness.spread(seconds[2:], 4),
    }


def _bytes(move: Move, block_bytes: int, state_bytes: int) -> int:
    return len(move.source) * block_bytes + (state_bytes if move.state is not None else 0)


def jobs(count: int) -> list[tuple[int, int]]:
    """Return prompt and output lengths, the long ones first, so that short requests wait behind them in order."""
    draw = random.Random(3)
    long = [(draw.randint(300, 500), draw.randint(100, 160)) for _ in range(count // 2)]
    return [*long, *((draw.randint(30, 80), draw.randint(8, 24)) for _ in range(count - len(long)))]


def serve(folder: Path, recipe: str, count: int) -> harness.Record:
    engine = assemble(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            recipe=recipe,
            recipe_params={"paced": False} if recipe == "fastserve" else {},
            profile="off",
            kv_cache_gib=KV_MIB / 1024,
            swap_space_gib=SWAP_GIB,
            max_num_seqs=SEQS,
        )
    )
    loop, info = EngineLoop(engine), engine.info
    ended: list[RequestFacts] = []
    log = RequestLog(ended.append)
    usage = EngineUsage(
        device_blocks=info.device_blocks,
        block_size=info.block_size,
        block_bytes=info.cpu_block_bytes,
        start=loop.clock(),
    )
    begin = time.perf_counter()
    for number, (prompt, output) in enumerate(jobs(count)):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        loop.add(number, [token % 8192 for token in prompt_of(number, prompt)], params)
    while not loop.idle:
        events = loop.step()
        log.observe(events)
        usage.observe(events)
    seconds = time.perf_counter() - begin
    loop.close()
    record = summarize(ended, now=loop.clock())
    swapped, states = usage.residency.swapped_bytes, engine.core.kv.states
    return {
        "seconds": round(seconds, 2),
        "ttft_s": record["ttft_s"]["mean"],
        "normalized_latency_s": record["normalized_latency_s"]["mean"],
        "preemptions": usage.residency.preempted,
        "swapped_mib": {way.name.lower(): round(sum(both) / 2**20, 2) for way, both in swapped.items()},
        "device_blocks": info.device_blocks,
        "block_bytes": info.block_bytes,
        "state_slots": 0 if states is None else states.total,
    }


def simulate(model: str, kv_gib: float, rate: float) -> list[harness.Record]:
    options = ("--model", model, "--kv-gib", kv_gib, "--swap-space", 40, "--rates", rate, "--requests", 400)
    rows = harness.records_of("simulate", *options, "--hardware", "a100-40gb", "--recipes", "fcfs,fastserve")
    return [
        {
            **{"model": model, "kv_gib": kv_gib, "rate_rps": rate, "recipe": row["recipe"]},
            **{"normalized_latency_s": row["normalized_latency_s"]["mean"], "ttft_s": row["ttft_s"]["mean"]},
            **{name: row["kv"][name] for name in ("swapped_out_bytes", "swapped_in_bytes")},
        }
        for row in rows
    ]


def compare_pauses() -> harness.Record:
    found = {name: pause(config) for name, config in (HYBRID | DENSE).items()}
    for name in HYBRID:
        found[name]["ratio"] = {other: round(found[name]["bytes"] / found[other]["bytes"], 4) for other in DENSE}
    return found


def compare_engines(repeats: int, requests: int) -> harness.Record:
    runs: dict[str, list[harness.Record]] = {}
    with harness.scratch() as scratch:
        for name, config in SERVED.items():
            (scratch / name).mkdir()
            (scratch / name / "config.json").write_text(json.dumps(config))
            write_words(scratch / name)
        cells = [(name, recipe) for name in SERVED for recipe in ("fcfs", "fastserve")]
        for turn in range(repeats):
            for name, recipe in harness.in_turn(cells, turn):
                found = serve(scratch / name, recipe, requests)
                runs.setdefault(f"{name} {recipe}", []).append(found)
                harness.show(name, recipe, found)
    return {"kv_mib": KV_MIB, "requests": requests, "runs": runs}


if __name__ == "__main__":
    made = harness.parser(__doc__, repeats=2, requests=24)
    made.add_argument("--parts", type=harness.some_of("parts", PARTS), default=list(PARTS))
    args = made.parse_args()
    record = {**harness.read_record(args.out), **harness.new_record(tokens=TOKENS, block_size=BLOCK)}
    for part in args.parts:
        if part == "pause":
            record[part] = compare_pauses()
        elif part == "simulated":
            record[part] = [row for case in SIMULATED for row in simulate(*case)]
        else:
            record[part] = compare_engines(args.repeats, args.requests)
    harness.report(record, args.out)
