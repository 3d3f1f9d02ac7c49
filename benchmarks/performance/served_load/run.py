"""Measure the largest arrival rate under one latency bound, for Skipjoin's recipes and vLLM over HTTP.

The model is a random-weight Llama of 97.5M parameters in bfloat16. Requests have a quarter of ShareGPT's lengths,
arrive as a Poisson process, and stream. The bound on the mean normalized latency (seconds from arrival to end per
output token) is ten decode iterations of a single request at the first server (FastServe section 6.1), or `--bound`.
All servers have the same KV, batch size and cores, and cut prompts into chunks of the same token budget. They run at
the same time and are loaded in turn: the rate of each rises from `--first` times its capacity, measured by a burst,
while the bound holds, or falls until it holds. The figure is the rate at which the mean over seeds reaches the bound,
interpolated between measured rates. The record is written after every run.

The record splits the ratio of `fastserve` to vLLM into factors: the engine (`fcfs` to vLLM, which schedules like it),
the order of requests while new ones wait for memory (`fastserve[eviction=defer]` to `fcfs`), and preemption of their KV
(`fastserve` to that).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from peer_venvs import names_of
from random_model import scratch_model
from servers import Server, Skipjoin, start_vllm
from skipjoin.observe.record import Record
from skipjoin.report.bound import Bound, MaximumRate, maximum_rate

# A quarter of ShareGPT's lengths: means of 40 prompt and 83 output tokens, at most 520 in total.
LENGTHS = "sharegpt*0.25"
# KV for 7,264 tokens, which is less than 64 requests need in the middle of their outputs.
KV_GIB, SWAP_GIB, MAX_SEQS = 0.25, 2.0, 64
# Token budget of a step in all servers.
MAX_TOKENS = 512
DEFER = "fastserve[eviction=defer]"
# Factors of the ratio of `fastserve` to vLLM: numerator and denominator.
PARTS = {"engine": ("fcfs", "vllm"), "order": (DEFER, "fcfs"), "preemption": ("fastserve", DEFER)}
BOUND_FACTOR = 10
# Ratio of consecutive rates, and the maximum number of rates.
STRIDE, MAX_RATES = 1.3, 8
# Requests in the burst that measures the capacity, and single requests that measure the decode iteration.
BURST, ALONE = 96, 4
PAUSE_S, RUN_TIMEOUT_S = 2.0, 900.0
FIELDS = ("normalized_latency_s", "ttft_s", "tpot_s")


class Search:
    def __init__(self, server: Server, capacity: float, bound: Bound, first: float) -> None:
        self.server, self.capacity = server, capacity
        self.rate: float | None = round(first * capacity, 3)
        self.rows: list[dict[str, Any]] = []
        self._bound = bound
        self._points: dict[float, list[Record]] = {}

    def add(self, records: list[Record], load: float) -> None:
        """Add the records of the current rate, one per seed, and set `rate` to the next one, or None at the end."""
        assert self.rate is not None
        self._points[self.rate] = records
        self.rows += [kept(record) | {"load_1min": round(load, 1)} for record in records]
        held = {rate: self._holds(rate) for rate in self._points}
        up = all(held.values())
        if len(set(held.values())) == 2 or len(held) == MAX_RATES:
            self.rate = None
        else:
            self.rate = round(max(held) * STRIDE if up else min(held) / STRIDE, 3)

    def _holds(self, rate: float) -> bool:
        values = [self._bound.value(record) for record in self._points[rate]]
        return self._bound.allows(sum(values) / len(values))

    @property
    def largest(self) -> str | None:
        """The largest rate under the bound, or None if it was exceeded at all rates."""
        found = self._largest
        return None if found is None else str(found)

    @property
    def largest_rps(self) -> float | None:
        found = self._largest
        return None if found is None else found.rate_rps

    @property
    def _largest(self) -> MaximumRate | None:
        return maximum_rate(self._points, self._bound)


def kept(record: Record) -> dict[str, Any]:
    part: dict[str, Any] = {"rate_rps": record["workload"]["rate_rps"], "seed": record["workload"]["seed"]}
    part |= {name: {key: record[name][key] for key in ("mean", "p95")} for name in FIELDS}
    return part | {"requests": record["requests"], "throughput_tps": record["throughput_tps"]}


def load(server: Server, *options: object) -> list[Record]:
    found: list[Record] = harness.records_of("bench", "--base-url", server.url, *options, timeout_s=RUN_TIMEOUT_S)
    return found


def alone(server: Server) -> float:
    """Return the seconds of a decode iteration of a single request."""
    options = ("--arrivals", "constant", "--rates", 0.4, "--requests", ALONE, "--warmup", 1)
    seconds: float = load(server, "--lengths", "fixed:40,30", *options)[0]["tpot_s"]["p50"]
    return seconds


def capacity(server: Server) -> float:
    """Return the requests per second that the server finishes of a burst."""
    options = ("--rates", 1000, "--requests", BURST, "--seeds", 100, "--warmup", 2)
    rate: float = load(server, "--lengths", LENGTHS, *options)[0]["throughput_rps"]
    return rate


def start_servers(stack: ExitStack, args: argparse.Namespace, folder: Path) -> tuple[dict[str, Server], dict[str, str]]:
    # The comparison is about order, so no request is refused.
    limits = ("--max-num-seqs", MAX_SEQS, "--kv-cache-gib", KV_GIB, "--max-num-queued-reqs", 100_000)
    limits += ("--max-num-batched-tokens", MAX_TOKENS)
    limits += ("--max-num-queued-tokens", 100_000_000, "--swap-space", SWAP_GIB)
    found: dict[str, Server] = {}
    for recipe in args.recipes:
        found[recipe] = stack.enter_context(Skipjoin(folder, "--recipe", recipe, *limits))
    peers, missing = start_vllm(stack, args.peers, folder, seqs=MAX_SEQS, kv_gib=KV_GIB, chunk_tokens=MAX_TOKENS)
    return found | peers, missing


def vllm_names(text: str) -> list[str]:
    """Parse a list of vLLM peers; other engines have no scheduler to compare with."""
    names = names_of(text)
    if any(not name.startswith("vllm") for name in names):
        raise argparse.ArgumentTypeError(f"peers must be of vllm, vllm-eager, got {text}")
    return names


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--peers", type=vllm_names, default=["vllm"])
    parser.add_argument("--recipes", type=harness.words, default=["fcfs", DEFER, "fastserve"])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals in a run")
    parser.add_argument("--first", type=float, default=1.0, help="first rate in multiples of a server's capacity")
    parser.add_argument("--bound", type=float, help="seconds per output token")
    args = parser.parse_args()
    record = harness.new_record(settings=settings(args))
    with scratch_model(torch.bfloat16) as folder, ExitStack() as stack:
        found, record["missing"] = start_servers(stack, args, folder)
        alone_s = record["alone_s"] = {name: alone(server) for name, server in found.items()}
        bound_s = record["bound_s"] = args.bound or round(BOUND_FACTOR * alone_s[args.recipes[0]], 4)
        bound = Bound("normalized_latency_s.mean", "<=", bound_s)
        searches = {name: Search(server, capacity(server), bound, args.first) for name, server in found.items()}
        record["capacity_rps"] = {name: round(one.capacity, 3) for name, one in searches.items()}
        turn = 0
        while unfinished := [name for name, search in searches.items() if search.rate is not None]:
            turn += 1
            for name in harness.in_turn(unfinished, turn):
                time.sleep(PAUSE_S)
                step(searches[name], args)
                harness.show(f"{name}: {searches[name].rows[-1]}, bound {bound_s} s per token")
                record["largest_rate_rps"] = {name: one.largest for name, one in searches.items()}
                record["factors"] = factors(searches)
                record["rows"] = {name: one.rows for name, one in searches.items()}
                harness.write_record(record, args.out)
    harness.show(record["largest_rate_rps"])


def factors(searches: dict[str, Search]) -> dict[str, float]:
    """Return the factors of `PARTS` whose servers both have a largest rate; bounds count as rates."""
    rates = {name: one.largest_rps for name, one in searches.items()}
    return {
        part: round(above / below, 3)
        for part, (one, other) in PARTS.items()
        if (above := rates.get(one)) and (below := rates.get(other))
    }


def step(search: Search, args: argparse.Namespace) -> None:
    """Measure the current rate of a search with all seeds."""
    options = ("--rates", search.rate, "--duration", args.duration, "--seeds", args.seeds, "--warmup", 0)
    search.add(load(search.server, "--lengths", LENGTHS, *options), os.getloadavg()[0])


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "lengths": LENGTHS,
        "duration_s": args.duration,
        "seeds": args.seeds,
        "kv_gib": KV_GIB,
        "swap_gib": SWAP_GIB,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
    }


if __name__ == "__main__":
    main()
