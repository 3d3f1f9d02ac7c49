"""The largest load that a server takes under one bound: Skipjoin's recipes and vLLM, over HTTP, in one run.

    python benchmarks/performance/served_load/run.py [--peers vllm] [--recipes fcfs,fastserve] [--seeds 0,1]
        [--duration 40] [--bound SECONDS] [--out FILE]

A random-weight Llama of 97.5M parameters in bfloat16. Requests have ShareGPT's lengths at a quarter and arrive as a
Poisson process; each is sent when it is due, and streams. The bound is on the mean normalized latency, seconds from
arrival to end per output token: ten decode iterations of a request that is alone at the first server (FastServe section
6.1), or `--bound`. All servers have as much KV, as many seats and all cores. They are up together, and loaded one
after the other: each steps up from about its capacity while it keeps the bound, or down until it does. The figure is
the rate at which the mean over seeds reaches the bound, interpolated between the rates that were measured. The result
is written after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine
from peer_venvs import PeerUnavailableError, names_of, python_of
from random_model import make_model
from servers import Server, skipjoin, vllm
from skipjoin.observe.record import Record
from skipjoin.report.bound import Bound, maximum_rate

# ShareGPT's shape at a quarter: 40 tokens of prompt and 83 of output on average, 520 at most.
LENGTHS = "sharegpt*0.25"
# Room for 7,000 tokens, of which 64 requests in the middle of their output take more.
KV_GIB, SWAP_GIB, SEATS = 0.25, 2.0, 64
BOUND_FACTOR = 10
# Between two rates that are tried.
STRIDE, MOST_RATES = 1.3, 8
# A burst of so many requests tells the capacity; so many alone the decode iteration.
BURST, ALONE = 96, 4
PAUSE_S, RUN_TIMEOUT_S = 2.0, 900.0
SKIPJOIN = Path(sys.executable).with_name("skipjoin")
FIELDS = ("normalized_latency_s", "ttft_s", "tpot_s")


class Search:
    """The rates to try at one server, and what came of them."""

    def __init__(self, server: Server, capacity: float, bound: Bound) -> None:
        self.server, self.capacity = server, capacity
        self.rate: float | None = round(capacity, 3)
        self.rows: list[dict[str, Any]] = []
        self._bound = bound
        self._points: dict[float, list[Record]] = {}

    def add(self, records: list[Record], load: float) -> None:
        """The records of the present rate, one for each seed; `rate` is the next one then, None where it is found."""
        assert self.rate is not None
        self._points[self.rate] = records
        self.rows += [kept(record) | {"load_1min": round(load, 1)} for record in records]
        held = {rate: self._holds(rate) for rate in self._points}
        up = all(held.values())
        if len(set(held.values())) == 2 or len(held) == MOST_RATES:
            self.rate = None
        else:
            self.rate = round(max(held) * STRIDE if up else min(held) / STRIDE, 3)

    def _holds(self, rate: float) -> bool:
        values = [self._bound.value(record) for record in self._points[rate]]
        return self._bound.allows(sum(values) / len(values))

    @property
    def largest(self) -> str | None:
        """The largest rate under the bound; None: even the lowest one broke it."""
        found = maximum_rate(self._points, self._bound)
        return None if found is None else str(found)


def kept(record: Record) -> dict[str, Any]:
    """The part of a record that the result keeps."""
    part: dict[str, Any] = {"rate_rps": record["workload"]["rate_rps"], "seed": record["workload"]["seed"]}
    part |= {name: {key: record[name][key] for key in ("mean", "p95")} for name in FIELDS}
    return part | {"requests": record["requests"], "throughput_tps": record["throughput_tps"]}


def load(server: Server, *options: object) -> list[Record]:
    """The records of one run of `skipjoin bench`. Raises RuntimeError if it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as folder:
        out = Path(folder) / "records.json"
        command = [SKIPJOIN, "bench", "--base-url", server.url, "--out", out, *options]
        try:
            subprocess.run([str(part) for part in command], stdout=sys.stderr, timeout=RUN_TIMEOUT_S, check=True)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"skipjoin bench: {error}") from error
        found: list[Record] = json.loads(out.read_text())
    return found


def alone(server: Server) -> float:
    """Seconds of a decode iteration of a request that is alone."""
    options = ("--arrivals", "constant", "--rates", 0.4, "--requests", ALONE, "--warmup", 1)
    seconds: float = load(server, "--lengths", "fixed:40,30", *options)[0]["tpot_s"]["p50"]
    return seconds


def capacity(server: Server) -> float:
    """Requests per second that the server finishes of a burst."""
    options = ("--rates", 1000, "--requests", BURST, "--seeds", 100, "--warmup", 2)
    rate: float = load(server, "--lengths", LENGTHS, *options)[0]["throughput_rps"]
    return rate


@contextmanager
def servers(args: argparse.Namespace, folder: Path) -> Iterator[tuple[dict[str, Server], dict[str, str]]]:
    """All servers, by name; of those that cannot be had, why not."""
    found: dict[str, Server] = {}
    missing: dict[str, str] = {}
    # No request is refused: the comparison is about order.
    limits = ("--max-num-seqs", SEATS, "--kv-cache-gib", KV_GIB, "--max-num-queued-reqs", 100_000)
    limits += ("--max-num-queued-tokens", 100_000_000, "--swap-space", SWAP_GIB)
    with ExitStack() as stack:
        for recipe in args.recipes:
            found[recipe] = stack.enter_context(skipjoin(folder, "--recipe", recipe, *limits))
        for name in args.peers:
            try:
                server = vllm(python_of(name), folder, seqs=SEATS, kv_gib=KV_GIB, is_eager=name == "vllm-eager")
                found[name] = stack.enter_context(server)
            except (PeerUnavailableError, RuntimeError) as error:
                missing[name] = str(error)
                print(f"{name} is left out: {error}", flush=True)
        yield found, missing


def vllm_names(text: str) -> list[str]:
    """See `names_of`; other engines have no scheduler to compare with."""
    names = names_of(text)
    if any(not name.startswith("vllm") for name in names):
        raise argparse.ArgumentTypeError(f"peers must be of vllm, vllm-eager, got {text}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=vllm_names, default=["vllm"])
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=["fcfs", "fastserve"])
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--duration", type=float, default=40.0, help="seconds of arrivals in a run")
    parser.add_argument("--bound", type=float, help="seconds per output token")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "settings": settings(args)}
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        folder = Path(scratch) / "model"
        make_model(folder, torch.bfloat16)
        with servers(args, folder) as (found, missing):
            alone_s = {name: alone(server) for name, server in found.items()}
            seconds = args.bound or round(BOUND_FACTOR * alone_s[args.recipes[0]], 4)
            bound = Bound("normalized_latency_s.mean", "<=", seconds)
            searches = {name: Search(server, capacity(server), bound) for name, server in found.items()}
            result |= {"missing": missing, "bound_s": seconds, "alone_s": alone_s}
            while open_ones := [(name, search) for name, search in searches.items() if search.rate is not None]:
                for name, search in open_ones:
                    time.sleep(PAUSE_S)
                    options = (
                        "--rates",
                        search.rate,
                        "--duration",
                        args.duration,
                        "--seeds",
                        args.seeds,
                        "--warmup",
                        0,
                    )
                    before = search.rate
                    search.add(load(search.server, "--lengths", LENGTHS, *options), os.getloadavg()[0])
                    latest = [row["normalized_latency_s"]["mean"] for row in search.rows if row["rate_rps"] == before]
                    print(f"{name}: {before} req/s, mean {latest} s per token, bound {seconds}", flush=True)
                    result["largest_rate_rps"] = {name: one.largest for name, one in searches.items()}
                    result["capacity_rps"] = {name: round(one.capacity, 3) for name, one in searches.items()}
                    result["rows"] = {name: one.rows for name, one in searches.items()}
                    if args.out:
                        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["largest_rate_rps"], indent=1, ensure_ascii=False))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs have in common."""
    return {
        "dtype": "bfloat16",
        "lengths": LENGTHS,
        "duration_s": args.duration,
        "seeds": args.seeds,
        "kv_gib": KV_GIB,
        "swap_gib": SWAP_GIB,
        "max_num_seqs": SEATS,
    }


if __name__ == "__main__":
    main()
