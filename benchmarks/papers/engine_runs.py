"""Comparisons of recipes and vLLM over HTTP, for the engine benchmarks of EconoServe and BROS.

The model is a random-weight Llama of 97.5M parameters in bfloat16. Real-time requests come from a trace with texts and
arrive as a Poisson process, at a multiple of the capacity of `fcfs` that a burst measures. Best-effort requests are a
closed loop. The KV pool is too small for all. The servers run at the same time and are loaded in turn with the same
requests, in reverse order in every second turn.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

import harness
from harness import Record
from papers.figures.report import fill_readme, shown_table, table
from papers.recipes import SPELLED
from random_model import scratch_model
from servers import NO_REFUSALS, Server, Skipjoin, bench_requests, full_rate, start_vllm
from skipjoin.config.profile import read_profile
from skipjoin.core.request import NO_TARGET, Target
from skipjoin.core.step import StepShape
from skipjoin.policies.cost import LinearCost
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.workload import DEFAULT, synthetic

# An eighth of ShareGPT's prompts and a quarter of its outputs: on a CPU, a token of a prompt takes a larger part of a
# decode step than on a GPU.
LENGTHS = "sharegpt*0.125,0.25"
# BROS section 7.1, scaled alike.
BEST_EFFORT = "name=best-effort,lengths=uniform:64-128,8-32,mode=refill"
MARKED, BLIND, PRIORITY = "class=best-effort", "", "priority=1"
# KV of 1,740 tokens, for about 20 requests, where the batch cap allows 64.
KV_GIB, SWAP_GIB, MAX_SEQS, MAX_TOKENS = 0.06, 2.0, 64, 512
PROFILE_S = 20
# Requests of the burst. The capacity is the rate at which the middle of them finish.
BURST, BURST_SEED = 160, 1000
# The closed loop is in its steady state after this time; its throughput is measured from then on.
SETTLED_S = 5.0
# Engines report their counters to `/metrics` at least this often.
REPORTED_S = 1.0
# Requests that train forecasts.
TAUGHT, TAUGHT_SEED = 2000, 1001
# Context of the decode step that objectives are multiples of: a request in the middle of its output.
CONTEXT = 60
# Words of prompts: every other one hints at the length of the output, by 16 words for each power of two.
FIRST_HINT, HINTS, OTHER_WORDS = 100, 16, range(1000, 8000)


@dataclass(frozen=True, slots=True)
class Entry:
    """Server with clients.

    Attributes:
        marks: Fields of `--closed` by which clients mark best-effort requests; `BLIND` if they do not.
    """

    server: str
    marks: str = MARKED


@dataclass(frozen=True, slots=True)
class Alone:
    cost: LinearCost

    @property
    def decode_s(self) -> float:
        return self.cost.step(StepShape(decodes=1, context=CONTEXT))

    def jct_s(self, job: WorkloadRequest) -> float:
        """Return the time of the prefill and of a decode step for each token (EconoServe section 4)."""
        prompt = job.prompt_tokens
        prefill = StepShape(prefill=prompt, attention=prompt * (prompt + 1) // 2)
        return self.cost.step(prefill) + job.output_tokens * self.decode_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """What an engine benchmark compares.

    Attributes:
        recipes: Recipe and further options by the name of a server.
        entries: Servers with clients; other servers than `recipes` are peers.
        load: Rate of real-time requests as a multiple of the capacity of `fcfs`.
        in_flight: Number of best-effort requests.
        target: Objectives of a real-time request.
        learns: Servers that start with trained forecasts.
        extra: Entries that run only if they are named.
    """

    recipes: Mapping[str, tuple[str, Sequence[object]]]
    entries: Mapping[str, Entry]
    load: float
    in_flight: int
    target: Callable[[Alone, WorkloadRequest], Target]
    learns: Sequence[str] = ()
    extra: Sequence[str] = ()


def write_trace(path: Path, jobs: Sequence[WorkloadRequest], target: Callable[[WorkloadRequest], Target]) -> None:
    """Write requests with prompts, arrival times and objectives."""
    draw, lines = random.Random(path.name), []
    for job in jobs:
        hints = range(FIRST_HINT + HINTS * job.output_tokens.bit_length(), OTHER_WORDS.start)[:HINTS]
        words = [draw.choice(hints if place % 2 else OTHER_WORDS) for place in range(job.prompt_tokens)]
        line = {"prompt": " ".join(f"w{word}" for word in words), "arrival_s": job.at}
        line |= {"prompt_tokens": job.prompt_tokens, "output_tokens": job.output_tokens}
        line |= {name: seconds for name, seconds in target(job)._asdict().items() if seconds < math.inf}
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def burst_of(folder: Path, seed: int, requests: int) -> Path:
    """Write requests that arrive together, and return their trace."""
    path = folder / f"burst-{seed}.jsonl"
    jobs = synthetic(LENGTHS, "poisson").draw(1.0, None, seed, requests)
    write_trace(path, [job._replace(at=0.0) for job in jobs], lambda job: NO_TARGET)
    return path


def sent(server: Server, trace: Path, *options: object) -> tuple[Record, list[Record]]:
    """Send the requests of a trace and return the record and the requests of `skipjoin bench`."""
    return bench_requests(server, "--trace", trace, "--warmup", 0, "--extra-body", '{"ignore_eos": true}', *options)


def capacity(server: Server, folder: Path) -> float:
    """Return the requests per second that a server finishes while many wait."""
    return full_rate(sent(server, burst_of(folder, BURST_SEED, BURST))[1])


def measure(server: Server, entry: Entry, trace: Path, in_flight: int, duration_s: float) -> tuple[Record, list[str]]:
    """Return the figures of a run and the texts of its real-time requests."""
    closed = ",".join(filter(None, (BEST_EFFORT, f"size={in_flight}", entry.marks)))
    before = lost_kv(server)
    record, requests = sent(server, trace, "--duration", duration_s, "--closed", closed)
    real_time, best_effort = record["classes"][DEFAULT], record["classes"]["best-effort"]
    if not real_time["requests"]["finished"]:
        raise RuntimeError("no real-time request has finished")
    met = {name: real_time["slo"][f"{name}_attained"] for name in ("all", "ttft", "tpot", "jct")}
    ends = [one["ended_s"] for one in requests if one["stream"] != DEFAULT and one["error"] is None]
    figures = {
        "met": {name: share for name, share in met.items() if share is not None},
        **{
            name: {key: real_time[name][key] for key in ("mean", "p50", "p95")}
            for name in ("ttft_s", "tpot_s", "jct_s")
        },
        "real_time_rps": real_time["window"]["throughput_rps"],
        "best_effort_rps": round(sum(SETTLED_S < end <= duration_s for end in ends) / (duration_s - SETTLED_S), 4),
        "requests": {"real_time": real_time["requests"], "best_effort": best_effort["requests"]},
        "lag_p99_s": record["client"]["lag_p99_s"],
    }
    time.sleep(REPORTED_S)
    figures["lost_kv"] = lost_kv(server) - before
    texts = {one["row"]: one["output"] for one in requests if one["stream"] == DEFAULT}
    return figures, [texts[row] for row in sorted(texts)]


def lost_kv(server: Server) -> int:
    """Return how often a request has lost KV, in part or in whole."""
    found = 0.0
    for name, value in server.metrics().items():
        metric, *labels = name.removeprefix("vllm:").split()
        found += value if metric == "num_preemptions_total" and "pause" not in labels else 0.0
    return round(found)


def compare(file: str, text: str | None, comparison: Comparison, *, duration_s: float) -> None:
    """Run the command of an engine benchmark, and write the record after every run."""
    parser = harness.parser(text, repeats=3)
    parser.add_argument("--duration", type=float, default=duration_s, help="seconds of arrivals in a run")
    usual = [name for name in comparison.entries if name not in comparison.extra]
    parser.add_argument("--entries", nargs="+", choices=comparison.entries, default=usual, metavar="NAME")
    args = parser.parse_args()
    if args.duration <= SETTLED_S:
        parser.error(f"--duration must be above {SETTLED_S:g} s, got {args.duration:g}")
    with scratch_model(torch.bfloat16) as model, ExitStack() as stack:
        alone = Alone(read_profile(profiled(model)).cost)
        servers, missing = started(stack, comparison, args.entries, model)
        rate = comparison.load * capacity(servers["fcfs"], model.parent)
        settings = said(comparison, alone, rate, args.duration) | {"missing": missing}
        record = harness.new_record(settings=settings, tables=[], rows=[])
        traces = [model.parent / f"requests-{seed}.jsonl" for seed in range(args.repeats)]
        for seed, path in enumerate(traces):
            jobs = synthetic(LENGTHS, "poisson").draw(rate, args.duration, seed)
            write_trace(path, jobs, partial(comparison.target, alone))
        run_all(record, comparison, servers, traces, args)
    if args.out is not None and args.out.resolve().parent == Path(file).resolve().parent:
        fill_readme(args.out.parent / "README.md", record)
    harness.show(*map(shown_table, record["tables"]))


def profiled(model: Path) -> Path:
    path = model.parent / "profile.json"
    limits = ("--kv-cache-gib", KV_GIB, "--max-num-seqs", MAX_SEQS, "--max-num-batched-tokens", MAX_TOKENS)
    harness.run_skipjoin("profile", model, "--out", path, "--seconds", PROFILE_S, *limits)
    return path


def started(
    stack: ExitStack, comparison: Comparison, entries: Sequence[str], model: Path
) -> tuple[dict[str, Server], dict[str, str]]:
    """Start `fcfs` and the servers of entries on a stack, and return them and the reasons for missing peers."""
    names = dict.fromkeys(("fcfs", *(comparison.entries[name].server for name in entries)))
    state = model.parent / "taught"
    if set(names) & set(comparison.learns):
        trace = burst_of(model.parent, TAUGHT_SEED, TAUGHT)
        harness.run_skipjoin("predict", "train", "--trace", trace, "--forecaster", "learned", "--out", state)
    common = ("--profile", model.parent / "profile.json", "--kv-cache-gib", KV_GIB, "--swap-space", SWAP_GIB)
    common += ("--max-num-seqs", MAX_SEQS, "--max-num-batched-tokens", MAX_TOKENS, "--forecast-dir", "none")
    found: dict[str, Server] = {}
    for name in names:
        if name in comparison.recipes:
            recipe, options = comparison.recipes[name]
            learns = ("--forecast-state", state) if name in comparison.learns else ()
            server = Skipjoin(model, "--recipe", SPELLED[recipe], *common, *NO_REFUSALS, *learns, *options)
            found[name] = stack.enter_context(server)
    peers = [name for name in names if name not in comparison.recipes]
    others, missing = start_vllm(stack, peers, model, seqs=MAX_SEQS, kv_gib=KV_GIB, chunk_tokens=MAX_TOKENS)
    return found | others, missing


def said(comparison: Comparison, alone: Alone, rate: float, duration_s: float) -> Record:
    return {
        "lengths": LENGTHS,
        "best_effort": f"{BEST_EFFORT},size={comparison.in_flight}",
        "kv_gib": KV_GIB,
        "max_num_seqs": MAX_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
        "duration_s": duration_s,
        "load": comparison.load,
        "rate_rps": round(rate, 3),
        "decode_alone_s": round(alone.decode_s, 5),
    }


def run_all(
    record: Record,
    comparison: Comparison,
    servers: Mapping[str, Server],
    traces: Sequence[Path],
    args: argparse.Namespace,
) -> None:
    """Measure all entries in turns, and add their rows and the table to the record.

    Args:
        traces: Real-time requests by seed.
    """
    texts: dict[tuple[int, str], list[str]] = {}
    names = [name for name in args.entries if comparison.entries[name].server in servers]
    for seed, name in harness.turns(names, range(args.repeats)):
        entry = comparison.entries[name]
        row: Record = {"entry": name, "seed": seed}
        try:
            found, texts[seed, name] = measure(
                servers[entry.server], entry, traces[seed], comparison.in_flight, args.duration
            )
            row |= found
        except RuntimeError as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            row["failed"] = str(error)
        record["rows"].append(row)
        count_other_texts(record["rows"], texts, names[0])
        record["tables"] = [tabulated(record["rows"])]
        harness.show(row)
        harness.write_record(record, args.out)


def count_other_texts(rows: Sequence[Record], texts: Mapping[tuple[int, str], list[str]], base: str) -> None:
    """Count the texts of each row that differ from those of the entry `base` with the same seed."""
    for row in rows:
        pair = (texts.get((row["seed"], row["entry"])), texts.get((row["seed"], base)))
        if pair[0] is not None and pair[1] is not None:
            row["other_texts"] = sum(one != other for one, other in zip(pair[0], pair[1], strict=True))


_TIMES = (("ttft_s", "p50"), ("ttft_s", "p95"), ("tpot_s", "p50"), ("tpot_s", "p95"), ("jct_s", "mean"))


def tabulated(rows: Sequence[Record]) -> Record:
    """Return the table of medians over seeds, and of ranges where they matter."""
    done = [row for row in rows if "failed" not in row]
    objectives = [name for name in done[0]["met"] if name != "all"] if done else []
    first = done[0]["entry"] if done else ""
    base = {row["seed"]: row["best_effort_rps"] for row in done if row["entry"] == first}
    columns = ["entry", "objectives met", *(f"{name.upper()} met" for name in objectives)]
    columns += ["TTFT P50, s", "P95", "TPOT P50, s", "P95", "JCT, s", "best effort, req/s", f"to {first}"]
    lines = []
    for name in dict.fromkeys(row["entry"] for row in done):
        mine = [row for row in done if row["entry"] == name]
        line = [name, ranged([row["met"]["all"] for row in mine])]
        line += [median(row["met"][one] for row in mine) for one in objectives]
        line += [median(row[field][key] for row in mine) for field, key in _TIMES]
        ratios = [row["best_effort_rps"] / base[row["seed"]] for row in mine if base.get(row["seed"])]
        line += [median(row["best_effort_rps"] for row in mine), ranged(ratios)]
        lines.append((*line, sum(row["lost_kv"] for row in mine), sum(row.get("other_texts", 0) for row in mine)))
    return table("Over HTTP", (*columns, "lost KV", "other texts"), lines)


def ranged(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
