"""Compare how long programs of agents take over HTTP: Skipjoin, its `fcfs` without programs, and vLLM.

    python benchmarks/performance/agents/run.py --out result.json
    python benchmarks/performance/agents/run.py --servers adaptive,vllm --seeds 0,1,2

The model has the shape of SmolLM2-135M and random weights. Programs are those of `skipjoin.workload.agents`, with
lengths and pauses for which two cores suffice: at most 12 calls and 4,096 tokens. A call sends all token ids before it,
the server's own outputs among them, so that prefix caches find them. Only Skipjoin reads the program's name.

All servers have the same bytes of KV, fewer than the live programs need, no CPU tier, and equal slots, token budgets
and block sizes; prefix caching is on in all. They take turns: the others are stopped by a signal. A seed gives every
server the same programs and arrivals. The record is written after every run, and `--out` continues a record.

`vllm-adaptive` is vLLM with Skipjoin's scheduler, which orders calls, not programs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from peer_venvs import PeerUnavailableError, python_of
from random_model import SHAPES, scratch_model
from servers import NO_REFUSALS, Server, Skipjoin, running, stop_in_turn, vllm
from skipjoin.routes import PROGRAM_HEADER
from skipjoin.workload.agents import Agents, Tail
from skipjoin.workload.request import WorkloadRequest

SHAPE = "smollm2"
AGENTS = Agents(
    calls=(2, 12),
    templates=4,
    template_tokens=512,
    task=Tail(300, 0.8, 1024),
    output=Tail(24, 0.8, 128),
    result=Tail(40, 1.3, 512),
    slow=Tail(3.0, 1.3, 30.0),
)
MAX_LEN, SLOTS, MAX_TOKENS, BLOCK = 4096, 8, 256, 32
# Time after which a run counts as missing.
RUN_S = 400.0
OURS = ("adaptive", "fcfs")
SERVERS = (*OURS, "vllm", "vllm-adaptive")
# Ratios of mean completion times: numerator and denominator.
RATIOS = {"vllm_over_adaptive": ("vllm", "adaptive"), "engine": ("vllm", "fcfs"), "order": ("fcfs", "adaptive")}
PLUGIN = ("--scheduler-cls", "skipjoin.vllm.Scheduler")


def programs(seed: int, rate: float, number: int) -> list[list[WorkloadRequest]]:
    """Return the calls of each program, without those that exceed the context."""
    calls = [job for job in AGENTS.draw(rate, None, seed, number) if job.prompt_tokens + job.output_tokens <= MAX_LEN]
    return [list(jobs) for _, jobs in groupby(calls, key=lambda job: job.program)]


def ids(name: str, count: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(3, SHAPES[SHAPE]["vocab_size"]) for _ in range(count)]


def first_prompt(seed: int, job: WorkloadRequest) -> list[int]:
    """Return the prompt of a first call, whose leading parts are those of the program's template."""
    assert job.parts is not None
    found = [token for name in job.parts.names for token in ids(f"{seed}/{name}", job.parts.tokens)]
    return (found + ids(f"{seed}/{job.program}", job.parts.tokens))[: job.prompt_tokens]


class Program:
    """A program that runs against a server.

    Attributes:
        call_s: Seconds from sending each call to its answer.
        prompt_tokens, cached_tokens: Of all calls.
        lost_tokens: Tokens of full blocks that the call before had computed, and that were not found.
    """

    def __init__(self, seed: int, jobs: Sequence[WorkloadRequest]) -> None:
        self._jobs = jobs
        self._prompt = first_prompt(seed, jobs[0])
        self._seed = seed
        self.call_s: list[float] = []
        self.completion_s = 0.0
        self.prompt_tokens = self.cached_tokens = self.lost_tokens = 0

    async def run(self, client: httpx.AsyncClient, model: str, begin: float) -> None:
        await asyncio.sleep(begin + self._jobs[0].at - time.perf_counter())
        start = time.perf_counter()
        for number, job in enumerate(self._jobs):
            if job.pause_s is not None:
                await asyncio.sleep(job.pause_s)
                self._prompt += ids(f"{self._seed}/{job.program}/{number}", job.prompt_tokens - len(self._prompt))
            await self._call(client, model, job)
        self.completion_s = time.perf_counter() - start

    async def _call(self, client: httpx.AsyncClient, model: str, job: WorkloadRequest) -> None:
        length = {"max_tokens": job.output_tokens, "min_tokens": job.output_tokens, "ignore_eos": True}
        body = {"model": model, "prompt": self._prompt, "temperature": 0, "return_token_ids": True, **length}
        start = time.perf_counter()
        answer = await client.post("/v1/completions", json=body, headers={PROGRAM_HEADER: job.program})
        self.call_s.append(time.perf_counter() - start)
        found = answer.raise_for_status().json()
        output = found["choices"][0]["token_ids"]
        if len(output) != job.output_tokens:
            raise RuntimeError(f"{len(output)} tokens instead of {job.output_tokens}")
        cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        known = self._jobs[len(self.call_s) - 2] if len(self.call_s) > 1 else None
        computed = 0 if known is None else (known.prompt_tokens + known.output_tokens - 1) // BLOCK * BLOCK
        self.prompt_tokens += len(self._prompt)
        self.cached_tokens += cached
        self.lost_tokens += max(0, computed - cached)
        self._prompt = self._prompt + output


async def run(server: Server, seed: int, plan: Sequence[Sequence[WorkloadRequest]]) -> dict[str, Any]:
    """Run all programs and return their figures.

    Raises:
        TimeoutError: They take longer than `RUN_S`.
    """
    found = [Program(seed, jobs) for jobs in plan]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
        begin = time.perf_counter()
        await asyncio.wait_for(asyncio.gather(*(program.run(client, server.name, begin) for program in found)), RUN_S)
        lasted_s = time.perf_counter() - begin
    calls = sorted(seconds for program in found for seconds in program.call_s)
    completions = sorted(program.completion_s for program in found)
    return {
        "mean_completion_s": round(fmean(completions), 2),
        "longest_completion_s": round(completions[-1], 2),
        "mean_call_s": round(fmean(calls), 3),
        "p95_call_s": round(calls[int(0.95 * len(calls))], 3),
        "prompt_tokens": sum(program.prompt_tokens for program in found),
        "cached_tokens": sum(program.cached_tokens for program in found),
        "lost_tokens": sum(program.lost_tokens for program in found),
        "lasted_s": round(lasted_s, 1),
        "load_1min": round(os.getloadavg()[0], 1),
        "completions_s": [round(program.completion_s, 1) for program in found],
    }


def start(name: str, folder: Path, dtype: str, kv_gib: float) -> Server:
    """Start a server by name.

    Raises:
        PeerUnavailableError: vLLM cannot be installed.
        RuntimeError: The server does not start.
    """
    if name in OURS:
        limits = ("--max-num-seqs", SLOTS, "--max-num-batched-tokens", MAX_TOKENS, "--block-size", BLOCK)
        limits += ("--max-model-len", MAX_LEN, "--kv-cache-gib", kv_gib, "--swap-space", 0, *NO_REFUSALS)
        return Skipjoin(folder, "--recipe", name, "--dtype", dtype, *limits)
    plugin = (*PLUGIN, "--additional-config", json.dumps({"skipjoin": {"recipe": "adaptive"}}))
    options = ("--enable-prefix-caching", "--enable-prompt-tokens-details", *(plugin if name != "vllm" else ()))
    return vllm(
        python_of("vllm"), folder, seqs=SLOTS, dtype=dtype, kv_gib=kv_gib, chunk_tokens=MAX_TOKENS, max_len=MAX_LEN,
        options=options, python_path="" if name == "vllm" else str(harness.ROOT / "src"),
    )  # fmt: skip


def ratios(runs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return, for each of `RATIOS`, the ratio of means over common seeds and the ratio of each seed."""
    found = {}
    for name, (above, below) in RATIOS.items():
        if seeds := [seed for seed in runs.get(above, ()) if seed in runs.get(below, ())]:
            pairs = [[runs[one][seed]["mean_completion_s"] for one in (above, below)] for seed in seeds]
            mean = fmean(one for one, _ in pairs) / fmean(other for _, other in pairs)
            found[name] = {"mean": round(mean, 3), "by_seed": [round(one / other, 3) for one, other in pairs]}
    return found


def main() -> None:
    parser = harness.parser(__doc__, programs=10)
    known = harness.some_of("servers", SERVERS)
    parser.add_argument(
        "--servers", type=known, default=["adaptive", "vllm", "fcfs"], help="default adaptive,vllm,fcfs"
    )
    parser.add_argument("--seeds", type=harness.words, default=["0", "1"], help="default 0,1")
    parser.add_argument("--rate", type=float, default=0.2, help="programs that begin per second, default 0.2")
    parser.add_argument("--kv-gib", type=float, default=0.2, help="GiB of KV, default 0.2")
    parser.add_argument("--dtype", default="float32", help="default float32, in which vLLM is fast without AVX-512")
    args = parser.parse_args()
    plans = {seed: programs(int(seed), args.rate, args.programs) for seed in args.seeds}
    runs: dict[str, dict[str, dict[str, Any]]] = harness.read_record(args.out).get("runs", {})
    sizes = {"max_num_seqs": SLOTS, "max_num_batched_tokens": MAX_TOKENS, "block_size": BLOCK, "max_model_len": MAX_LEN}
    settings = {"shape": SHAPE, "dtype": args.dtype, "kv_gib": args.kv_gib, "rate_rps": args.rate, **sizes}
    workload = {
        seed: {
            "programs": len(plan),
            "calls": sum(map(len, plan)),
            "output_tokens": sum(job.output_tokens for jobs in plan for job in jobs),
        }
        for seed, plan in plans.items()
    }
    record = harness.new_record(settings=settings, workload=workload, missing={}, ratios=ratios(runs), runs=runs)
    with scratch_model(getattr(torch, args.dtype), SHAPE) as folder, ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in args.servers:
            try:
                servers[name] = stack.enter_context(start(name, folder, args.dtype, args.kv_gib))
            except (PeerUnavailableError, RuntimeError) as error:
                record["missing"][name] = str(error)
                harness.show(f"{name} is left out: {error}")
                continue
            asyncio.run(run(servers[name], -1, [jobs[:2] for jobs in programs(-1, 10.0, 2)]))  # warms up
            harness.show(f"{name} runs")
            stop_in_turn(stack, servers[name].process)
        for seed, name in harness.turns(servers, args.seeds):
            if seed in runs.setdefault(name, {}):
                continue
            try:
                with running(servers[name].process):
                    runs[name][seed] = asyncio.run(run(servers[name], int(seed), plans[seed]))
            except TimeoutError:
                record["missing"][f"{name}, seed {seed}"] = f"longer than {RUN_S:g} s"
            record["ratios"] = ratios(runs)
            harness.write_record(record, args.out)
            harness.show(name, seed, runs[name].get(seed), record["ratios"])
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
