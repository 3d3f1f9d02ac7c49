"""Times to the first token of conversations, turn by turn, over HTTP: with prefix caching and without, with a host tier
and without, and vLLM's, in one run.

    python benchmarks/performance/prefix/chat.py [--peers vllm] [--rounds 3] [--out FILE]

A random-weight Llama of 97.5M parameters in bfloat16. Conversations begin with the same 192 tokens; the prompt of each
turn is that of the turn before and 160 more tokens. They are random and not the answers of the turn before, as no API
gives those as tokens everywhere: what is generated is found by none. All first turns are sent, then all second
ones, and so on, four at a time, so that between two turns of a conversation all others have theirs.

Two sizes of KV: "ample", for all conversations, and "small", for a quarter of their tokens, with a host pool that has
room for all; vLLM has none on a CPU, and no such small pool. The servers of a size are up together, and take turns: a
round of each with new conversations, then the next round. The result is written after every round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine
from peer_venvs import PeerUnavailableError, names_of, python_of
from random_model import VOCAB, make_model
from servers import Server, skipjoin, vllm

COMMON, TURN, TURNS, OUTPUT = 192, 160, 5, 16
CONVERSATIONS, AT_ONCE = 16, 4
# Tokens of all conversations: 16 * (192 + 5 * 160 + 16), of which a GiB of the model's KV holds 29,127.
SIZES = {"ample": 1.0, "small": 0.15}
HOST_GIB, SEATS, TIMEOUT_S = 1.0, 16, 300.0


async def first_token(client: httpx.AsyncClient, server: Server, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
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
    """The turns of a round of conversations: times to the first token, and tokens that were cached."""
    draw = random.Random(seed)
    common = [draw.randrange(3, VOCAB) for _ in range(COMMON)]
    prompts = [list(common) for _ in range(CONVERSATIONS)]
    rows = []
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        seats = asyncio.Semaphore(AT_ONCE)

        async def ask(prompt: list[int]) -> tuple[float, int]:
            async with seats:
                return await first_token(client, server, prompt)

        for _ in range(TURNS):
            for prompt in prompts:
                prompt += [draw.randrange(3, VOCAB) for _ in range(TURN)]
            found = await asyncio.gather(*map(ask, prompts))
            rows.append({"ttft_s": [round(ttft, 5) for ttft, _ in found], "cached": sum(cached for _, cached in found)})
    return rows


def servers(args: argparse.Namespace, kv_gib: float, model: Path, stack: ExitStack) -> dict[str, Server]:
    """All servers with so much KV, by name."""
    ours = ("--recipe", "fcfs", "--max-num-seqs", SEATS, "--kv-cache-gib", kv_gib, "--max-model-len", 1024)
    kinds = {
        "skipjoin": ("--swap-space", HOST_GIB),
        "skipjoin, no host pool": ("--swap-space", 0),
        "skipjoin, no caching": ("--swap-space", HOST_GIB, "--no-enable-prefix-caching"),
    }
    found = {name: stack.enter_context(skipjoin(model, *ours, *options)) for name, options in kinds.items()}
    for name in args.peers if kv_gib % 1 == 0 else ():  # vLLM's pool on a CPU has whole GiB
        try:
            peer = vllm(python_of(name), model, seqs=SEATS, kv_gib=kv_gib, is_eager=name == "vllm-eager")
            found[name] = stack.enter_context(peer)
        except (PeerUnavailableError, RuntimeError) as error:
            print(f"{name} is left out: {error}", flush=True)
    return found


def summary(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds and conversations, and their spread over rounds."""
    prompts = [CONVERSATIONS * (COMMON + TURN * turn) for turn in range(1, TURNS + 1)]

    def median(turns: slice) -> dict[str, float]:
        each = [statistics.median([one for row in rows[turns] for one in row["ttft_s"]]) for rows in rounds]
        return {"p50": round(statistics.median(each), 4), "least": round(min(each), 4), "most": round(max(each), 4)}

    cached = statistics.mean(sum(row["cached"] for row in rows[1:]) for rows in rounds)
    return {
        "first_turn_ttft_s": median(slice(1)),
        "last_turn_ttft_s": median(slice(TURNS - 1, TURNS)),
        "later_turns_ttft_s": median(slice(1, TURNS)),
        "later_turns_cached_share": round(cached / sum(prompts[1:]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=names_of, default=["vllm"])
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("chat.json"))
    args = parser.parse_args()
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "settings": {"common": COMMON, "turn": TURN, "turns": TURNS, "conversations": CONVERSATIONS, "at_once": AT_ONCE}
        | {"output": OUTPUT, "kv_gib": SIZES, "host_gib": HOST_GIB, "rounds": args.rounds},
    }
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        model = Path(scratch) / "model"
        make_model(model, torch.bfloat16)
        for size in args.sizes:
            with ExitStack() as stack:
                found = servers(args, SIZES[size], model, stack)
                rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in found}
                for number in range(-1, args.rounds):  # the first one warms up
                    for name, server in found.items():
                        rows = asyncio.run(converse(server, 100 + number))
                        if number >= 0:
                            rounds[name].append(rows)
                    result[size] = {name: summary(rows) for name, rows in rounds.items() if rows}
                    args.out.write_text(json.dumps(result, indent=1) + "\n")
                for name, figures in result[size].items():
                    print(size, name, json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
