"""Measure times to the first token of conversations over HTTP, with and without prefix caching and a CPU tier.

The model is a random-weight Llama of 97.5M parameters in bfloat16. All conversations begin with the same 192 tokens.
The prompt of each turn is that of the previous turn and 160 more random tokens; answers are not part of it, because not
every API returns them as tokens. All first turns are sent, then all second turns, and so on, four at a time.

There are two sizes of KV: "ample" for all conversations, and "small" for a quarter of their tokens with a CPU pool for
all of them. vLLM has no CPU pool on a CPU, and no pool of the small size. The servers of a size run at the same time
and take turns, each round with new conversations. The record is written after every round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from peer_venvs import names_of
from random_model import VOCAB, scratch_model
from servers import Server, Skipjoin, start_vllm

COMMON, TURN, TURNS, OUTPUT = 192, 160, 5, 16
CONVERSATIONS, CONCURRENT = 16, 4
# GiB of KV. All conversations have 16 * (192 + 5 * 160 + 16) tokens; a GiB of the model's KV holds 29,127.
SIZES = {"ample": 1.0, "small": 0.15}
CPU_GIB, MAX_SEQS, TIMEOUT_S = 1.0, 16, 300.0


async def first_token(client: httpx.AsyncClient, server: Server, prompt: list[int]) -> tuple[float, int]:
    body = {
        "model": server.name,
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, ttft, cached = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"]:
                ttft = ttft or time.perf_counter() - start
            elif usage := event.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ttft, cached


async def converse(server: Server, seed: int) -> list[dict[str, Any]]:
    """Run a round of conversations and return the times to the first token and the cached tokens of each turn."""
    draw = random.Random(seed)
    common = [draw.randrange(3, VOCAB) for _ in range(COMMON)]
    prompts = [list(common) for _ in range(CONVERSATIONS)]
    rows = []
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        slots = asyncio.Semaphore(CONCURRENT)

        async def ask(prompt: list[int]) -> tuple[float, int]:
            async with slots:
                return await first_token(client, server, prompt)

        for _ in range(TURNS):
            for prompt in prompts:
                prompt += [draw.randrange(3, VOCAB) for _ in range(TURN)]
            found = await asyncio.gather(*map(ask, prompts))
            rows.append({"ttft_s": [round(ttft, 5) for ttft, _ in found], "cached": sum(cached for _, cached in found)})
    return rows


def start_servers(stack: ExitStack, args: argparse.Namespace, kv_gib: float, model: Path) -> dict[str, Server]:
    ours = ("--recipe", "fcfs", "--max-num-seqs", MAX_SEQS, "--kv-cache-gib", kv_gib, "--max-model-len", 1024)
    kinds = {
        "skipjoin": ("--swap-space", CPU_GIB),
        "skipjoin, no CPU pool": ("--swap-space", 0),
        "skipjoin, no caching": ("--swap-space", CPU_GIB, "--no-enable-prefix-caching"),
    }
    found: dict[str, Server] = {
        name: stack.enter_context(Skipjoin(model, *ours, *options)) for name, options in kinds.items()
    }
    peers = args.peers if kv_gib % 1 == 0 else ()  # vLLM's pool on a CPU has whole GiB
    return found | start_vllm(stack, peers, model, seqs=MAX_SEQS, kv_gib=kv_gib)[0]


def summary(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over conversations and their spread over rounds."""
    prompts = [CONVERSATIONS * (COMMON + TURN * turn) for turn in range(1, TURNS + 1)]

    def median(turns: slice) -> dict[str, float]:
        each = [statistics.median([one for row in rows[turns] for one in row["ttft_s"]]) for rows in rounds]
        return harness.spread(each, 4)

    cached = statistics.mean(sum(row["cached"] for row in rows[1:]) for rows in rounds)
    return {
        "first_turn_ttft_s": median(slice(1)),
        "last_turn_ttft_s": median(slice(TURNS - 1, TURNS)),
        "later_turns_ttft_s": median(slice(1, TURNS)),
        "later_turns_cached_share": round(cached / sum(prompts[1:]), 4),
    }


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--peers", type=names_of, default=["vllm"])
    parser.add_argument("--sizes", type=harness.some_of("sizes", SIZES), default=list(SIZES))
    args = parser.parse_args()
    settings = {"common": COMMON, "turn": TURN, "turns": TURNS, "conversations": CONVERSATIONS}
    settings |= {"concurrent": CONCURRENT, "output": OUTPUT, "kv_gib": SIZES, "cpu_gib": CPU_GIB}
    result = harness.new_record(settings=settings | {"rounds": args.rounds})
    with scratch_model(torch.bfloat16) as model:
        for size in args.sizes:
            with ExitStack() as stack:
                found = start_servers(stack, args, SIZES[size], model)
                rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in found}
                for number in range(-1, args.rounds):  # the first round is a warm-up
                    for name, server in found.items():
                        rows = asyncio.run(converse(server, 100 + number))
                        if number >= 0:
                            rounds[name].append(rows)
                    result[size] = {name: summary(rows) for name, rows in rounds.items() if rows}
                    harness.write_record(result, args.out)
                for name, figures in result[size].items():
                    harness.show(size, name, figures)


if __name__ == "__main__":
    main()
