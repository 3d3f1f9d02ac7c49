"""Compare recipes and vLLM over HTTP: five cells that overflow, and one in which nothing is short.

The model is a random-weight Llama of 97.5M parameters in bfloat16. In the first cells, requests arrive at `--load`
times the capacity of the first recipe, which the middle of a burst measures. In the cell `ample` six background
generations run all the time, and short chats arrive at a twentieth of the capacity, with the default number of slots.
The servers of a cell run at the same time and are loaded in turn, in reverse order in every second turn. The record is
written after every run. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import harness
from peer_venvs import names_of
from random_model import scratch_model
from servers import NO_REFUSALS, Server, Skipjoin, bench, bench_requests, full_rate, start_vllm

CHAT_LOAD = 0.05
BURST, TIMEOUT_S = 160, 900.0
BACKGROUND, BACKGROUND_TOKENS = 6, 800
FIELDS = {
    "mean": ("normalized_latency_s", "mean"),
    "p95": ("normalized_latency_s", "p95"),
    "ttft_p50": ("ttft_s", "p50"),
    "ttft_p95": ("ttft_s", "p95"),
}
# Figures of each turn, by server.
Rows = Mapping[str, list[dict[str, float]]]


@dataclass(frozen=True)
class EngineCell:
    """A cell: options of `skipjoin bench`, and the engine's KV and slots.

    Attributes:
        load: Relative to the capacity; None for `--load`.
        background: Number of generations that run all the time.
    """

    workload: tuple[str, ...]
    kv_gib: float
    seqs: int
    load: float | None = None
    background: int = 0


_TWO_KINDS = ("--lengths", "uniform:16-48,5-12", "--stream", "name=long,lengths=uniform:16-48,150-250,share=0.25")
CELLS = {
    "sharegpt, little KV": EngineCell(("--lengths", "sharegpt*0.25"), 0.25, 64),
    "equal, little KV": EngineCell(("--lengths", "fixed:40,80"), 0.25, 64),
    "two kinds, little KV": EngineCell(_TWO_KINDS, 0.25, 64),
    "sharegpt, 8 slots": EngineCell(("--lengths", "sharegpt*0.25"), 2.0, 8),
    "equal, 8 slots": EngineCell(("--lengths", "fixed:40,80"), 2.0, 8),
    "ample": EngineCell(("--lengths", "uniform:30-100,10-30"), 2.0, 256, CHAT_LOAD, BACKGROUND),
}


@contextmanager
def background(server: Server, count: int) -> Iterator[None]:
    stopping = threading.Event()

    def generate(number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not stopping.is_set():
                body = {
                    "model": server.name,
                    "prompt": draw.choices(range(100, 500), k=60),
                    "max_tokens": BACKGROUND_TOKENS,
                    "ignore_eos": True,
                    "stream": True,
                }
                with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        if stopping.is_set():
                            return

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        if count:
            time.sleep(harness.PAUSE_S)
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def measure(server: Server, cell: EngineCell, rate: float, duration_s: float, seed: int) -> dict[str, float]:
    options = ("--rates", round(rate, 3), "--duration", duration_s, "--seeds", seed, "--warmup", 0)
    with background(server, cell.background):
        record = bench(server, *cell.workload, *options)
    found = {name: record[outer][inner] for name, (outer, inner) in FIELDS.items()}
    return found | {"throughput_rps": record["window"]["throughput_rps"]}


def over_best(rows: Rows, recipes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the spread, over the turns, of the last recipe's latencies relative to the best of the others."""
    *others, ours = recipes
    turns = zip(*(rows.get(name, []) for name in (ours, *others)), strict=False)
    ratios = [{key: own[key] / min(one[key] for one in rest) for key in FIELDS} for own, *rest in turns if rest]
    return harness.spreads(ratios) if ratios else {}


def run_cell(name: str, args: argparse.Namespace, folder: Path, record: harness.Record) -> None:
    """Measure a cell in turns, one per seed."""
    cell = CELLS[name]
    limits = ("--max-num-seqs", cell.seqs, "--kv-cache-gib", cell.kv_gib, "--swap-space", 2.0, "--forecast-dir", "none")
    limits += NO_REFUSALS
    with ExitStack() as stack:
        found: dict[str, Server] = {
            recipe: stack.enter_context(Skipjoin(folder, "--recipe", recipe, *limits)) for recipe in args.recipes
        }
        peers, missing = start_vllm(stack, args.peers, folder, seqs=cell.seqs, kv_gib=cell.kv_gib)
        found |= peers
        first = found[args.recipes[0]]
        burst = ("--rates", 1000, "--requests", BURST, "--seeds", 100, "--warmup", 2)
        capacity = full_rate(bench_requests(first, *cell.workload, *burst)[1])
        kept = record["cells"][name] = {"capacity_rps": round(capacity, 3), "missing": missing, "rows": {}}
        for seed, server in harness.turns(found, args.seeds):
            one = measure(found[server], cell, (cell.load or args.load) * capacity, args.duration, seed)
            kept["rows"].setdefault(server, []).append(one)
            harness.show(name, server, seed, one)
            kept["median"] = {name: harness.medians(rows, 5) for name, rows in kept["rows"].items()}
            kept["over_best"] = over_best(kept["rows"], args.recipes)
            harness.write_record(record, args.out)


def options(text: str | None, *, load: float, duration: float) -> argparse.ArgumentParser:
    made = harness.parser(text)
    made.add_argument("--recipes", type=harness.words, default=["fcfs", "sarathi", "fastserve", "alise", "adaptive"])
    made.add_argument("--seeds", type=lambda text: [int(one) for one in harness.words(text)], default=[0, 1, 2])
    made.add_argument("--load", type=float, default=load, help="rate in terms of the capacity, except in `ample`")
    made.add_argument("--duration", type=float, default=duration, help="seconds of arrivals in a run")
    made.add_argument("--cells", default="", help="run only cells whose name contains this text")
    return made


def main() -> None:
    parser = options(__doc__, load=1.2, duration=60.0)
    parser.add_argument("--peers", type=names_of, default=["vllm"])
    args = parser.parse_args()
    record = harness.new_record(duration_s=args.duration, load=args.load, cells={})
    with scratch_model(torch.bfloat16) as folder:
        for name in (one for one in CELLS if args.cells in one):
            run_cell(name, args, folder, record)
    for name, one in record["cells"].items():
        harness.show(name, one["median"], one["over_best"])


if __name__ == "__main__":
    main()
