"""Measure ALISE on a real engine over HTTP, with answers whose lengths follow from the prompts.

The built-in model answers tasks on one core; four in five have a short answer. `skipjoin bench` sends them as greedy
chats with the same large `max_tokens`, as a Poisson process above the capacity of `fcfs`. Every run has a new server.
Recipes take turns at each rate, then all again with other tasks and arrival times. Within a repeat and rate all runs
send the same chats at the same times.

The preparation profiles the machine, sends the chats of each repeat to `fcfs` all at once, and trains the forecasts of
one server on other chats. Answers under `fcfs` give its capacity, the true lengths (known to `alise-oracle` only) and
the reference texts. Runs named "taught" begin with the trained forecasts.

`--work` is the folder of the preparation. The record is written after every run, and a command with the same `--work`
and `--out` continues where the previous one stopped. After `--seconds` no further run starts.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[4] / name) for name in ("benchmarks/papers/alise", "benchmarks", "tools"))
from served import serve

import harness
from builtin_tasks import Task, draw_task
from papers.recipes import SPELLED
from servers import NO_REFUSALS, Skipjoin, bench_requests
from skipjoin.observe.record import percentile

Record = dict[str, Any]

# A small batch, so that requests wait for slots. The pool holds 1,296 tokens: too few for four long answers, and for
# preempted and running requests together.
MAX_SEQS, KV_GIB, SWAP_GIB = 4, 0.005, 0.25
MAX_TOKENS = 900
# Share of short answers, and bounds on the characters of short and long ones; there are none in between.
SHORT_SHARE, MAX_SHORT, MIN_LONG = 0.8, 60, 300
# Multiples of the capacity of `fcfs`.
LOADS = (1.2, 1.8)
TEACHING_SEED, PROFILE_S = 1000, 10
COUNTERS = {
    "preemptions": "num_preemptions_total",
    "swapped_out_bytes": "swap_out_bytes_total",
    "swapped_in_bytes": "swap_in_bytes_total",
    "recomputed_tokens": "recomputed_tokens_total",
    "generated_tokens": "generation_tokens_total",
    "steps": "engine_steps_total",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A server to compare.

    Attributes:
        taught: The server begins with trained forecasts.
        is_oracle: Requests carry their true lengths.
    """

    recipe: str
    options: tuple[str, ...] = ()
    taught: bool = False
    is_oracle: bool = False


ENTRIES = {
    "fcfs": Entry("fcfs"),
    "fastserve": Entry("fastserve"),
    "alise": Entry("alise"),
    "alise, taught": Entry("alise", taught=True),
    "alise, int8": Entry("alise", ("--swap-dtype", "int8"), taught=True),
    "alise, prior": Entry("alise", ("--forecaster", "prior")),
    "alise-oracle": Entry("alise-oracle", ("--set", "oracle=max-tokens"), is_oracle=True),
}


# -- chats ------------------------------------------------------------------------------------------------


def tasks(count: int, seed: int) -> list[Task]:
    """Return different tasks, most of them with a short answer."""
    draw, found = random.Random(seed), dict[str, Task]()
    while len(found) < count:
        short = draw.random() < SHORT_SHARE
        while not fits(task := draw_task(draw), short=short) or task.prompt in found:
            pass
        found[task.prompt] = task
    return list(found.values())


def fits(task: Task, *, short: bool) -> bool:
    return len(task.answer) <= MAX_SHORT if short else len(task.answer) >= MIN_LONG


def write_trace(path: Path, rows: Sequence[Task], lengths: Iterable[int]) -> None:
    lines = [{"prompt": task.prompt, "output_tokens": length} for task, length in zip(rows, lengths, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True, slots=True)
class Chats:
    """The chats of a repeat: their trace with true lengths, and the answer to each row."""

    trace: Path
    outputs: list[str]
    lengths: list[int]
    correct: float


# -- one run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """The folder of the preparation, and the attention backend of the servers."""

    folder: Path
    attention: str

    @property
    def profile(self) -> Path:
        return self.folder / "profile.json"

    @property
    def taught(self) -> Path:
        return self.folder / "taught"

    def trace(self, seed: int) -> Path:
        return self.folder / f"chats-{seed}.jsonl"

    def reference(self, seed: int) -> Path:
        return self.folder / f"reference-{seed}.json"

    def server(self, entry: Entry, state: Path | str = "none") -> Skipjoin:
        options: list[object] = ["--profile", self.profile, "--attention", self.attention]
        options += ["--recipe", SPELLED[entry.recipe], *entry.options]
        options += ["--max-num-seqs", MAX_SEQS, "--kv-cache-gib", KV_GIB, "--swap-space", SWAP_GIB]
        options += NO_REFUSALS
        return serve(*options, "--forecast-dir", state)


def send(
    server: Skipjoin, trace: Path, rate: float, seed: int, *, is_oracle: bool = False
) -> tuple[Record, list[Record]]:
    body = {"ignore_eos": True} if is_oracle else {"max_tokens": MAX_TOKENS}
    requests = len(trace.read_text().splitlines())
    options = ("--endpoint", "chat", "--trace", trace, "--rates", rate, "--seeds", seed, "--requests", requests)
    return bench_requests(server, *options, "--warmup", 0, "--extra-body", json.dumps(body))


def metrics_at_end(server: Skipjoin, requests: int) -> Counter[str]:
    """Return the server's metrics once it has counted the finished requests."""
    until = time.monotonic() + 10
    while sum((numbers := server.metrics())[name] for name in ENDED) < requests:
        if time.monotonic() > until:
            raise RuntimeError(f"the server counted fewer than {requests} requests")
        time.sleep(0.1)
    return numbers


JUDGED, ERROR = "forecast_error_octaves_count", "forecast_error_octaves_sum"
ENDED = ("request_success_total stop", "request_success_total length")


def measure(work: Work, entry: Entry, rate: float, seed: int) -> Record:
    chats = read_chats(work, seed)
    with harness.scratch() as folder:
        state = folder / "state"
        if entry.taught:
            shutil.copytree(work.taught, state)
        with work.server(entry, state) as server:
            record, lines = send(server, chats.trace, rate, seed, is_oracle=entry.is_oracle)
            numbers = metrics_at_end(server, record["requests"]["finished"])
    found: Record = {
        name: {key: round(record[name][key], 4) for key in ("mean", "p95")}
        for name in ("normalized_latency_s", "ttft_s", "jct_s")
    }
    found |= by_length(chats, lines)
    found |= {name: total(numbers, metric) for name, metric in COUNTERS.items()}
    found |= {
        "requests": record["requests"],
        "duration_s": round(record["duration_s"], 3),
        "lag_p99_s": record["client"]["lag_p99_s"],
        "output_tokens": sum(line["output_tokens"] for line in lines),
        "other_texts": sum(line["output"] != chats.outputs[line["row"]] for line in lines),
    }
    return found | forecasts(numbers)


def forecasts(numbers: Counter[str]) -> Record:
    if not numbers[JUDGED]:
        return {}
    return {
        "forecast": {
            "error_octaves": round(numbers[ERROR] / numbers[JUDGED], 3),
            "coverage": round(numbers["forecast_interval_total inside"] / numbers[JUDGED], 3),
            "late": int(numbers["forecasts_late_total"]),
            "mean_ms": round(1e3 * numbers["forecast_seconds_sum"] / numbers["forecast_seconds_count"], 3),
        }
    }


def total(numbers: Counter[str], metric: str) -> int:
    return int(sum(value for name, value in numbers.items() if name.split()[0] == metric))


def by_length(chats: Chats, lines: list[Record]) -> Record:
    """Return the completion times of short and of long answers."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for line in lines:
        times[len(chats.outputs[line["row"]]) >= MIN_LONG].append(line["ended_s"] - line["due_s"])
    return {f"{name}_jct_s": summary(times[long]) for name, long in (("short", False), ("long", True))}


def summary(values: list[float]) -> Record:
    return {"mean": round(statistics.fmean(values), 4), "p95": round(percentile(sorted(values), 95), 4)}


# -- preparation ------------------------------------------------------------------------------------------


def prepare(work: Work, requests: int, seeds: Sequence[int]) -> None:
    """Measure what the folder lacks."""
    work.folder.mkdir(parents=True, exist_ok=True)
    if not work.profile.exists():
        limits = ("--threads", 1, "--kv-cache-gib", KV_GIB, "--max-num-seqs", MAX_SEQS, "--attention", work.attention)
        harness.run_skipjoin("profile", "tally", "--out", work.profile, "--seconds", PROFILE_S, *limits)
    for seed in seeds:
        if not work.reference(seed).exists():
            answer_alone(work, requests, seed)
    if not work.taught.exists():
        teach(work, requests)


def answer_alone(work: Work, requests: int, seed: int) -> None:
    """Answer the chats of a repeat with `fcfs`, all at once."""
    rows = tasks(requests, seed)
    write_trace(work.trace(seed), rows, [1] * requests)
    with work.server(ENTRIES["fcfs"]) as server:
        record, lines = send(server, work.trace(seed), 1e4, seed)
    lines.sort(key=lambda line: line["row"])
    outputs, lengths = ([line[name] for line in lines] for name in ("output", "output_tokens"))
    write_trace(work.trace(seed), rows, lengths)
    correct = sum(output == task.answer for output, task in zip(outputs, rows, strict=True)) / requests
    found = {"throughput_rps": record["throughput_rps"], "correct": correct, "lengths": lengths, "outputs": outputs}
    work.reference(seed).write_text(json.dumps(found))
    harness.show(f"chats of seed {seed}: fcfs finishes {record['throughput_rps']:.2f} per second")


def teach(work: Work, requests: int) -> None:
    """Train the forecasts of a server on chats that are in no repeat."""
    known = {task.prompt for seed in range(100) if work.trace(seed).exists() for task in tasks(requests, seed)}
    rows = [task for task in tasks(requests, TEACHING_SEED) if task.prompt not in known]
    trace = work.folder / "teaching.jsonl"
    write_trace(trace, rows, [1] * len(rows))
    partial = work.folder / "taught.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with work.server(ENTRIES["alise"], partial) as server:
        send(server, trace, 1e4, TEACHING_SEED)
    partial.rename(work.taught)
    harness.show(f"the forecasts are trained on {len(rows)} other chats")


def read_chats(work: Work, seed: int) -> Chats:
    found = json.loads(work.reference(seed).read_text())
    return Chats(work.trace(seed), found["outputs"], found["lengths"], found["correct"])


def capacity(work: Work, seeds: Sequence[int]) -> float:
    """Return the requests per second that `fcfs` finishes when all are present at the start."""
    return statistics.fmean(json.loads(work.reference(seed).read_text())["throughput_rps"] for seed in seeds)


# -- all runs ---------------------------------------------------------------------------------------------


def plan(rate: float, seeds: Sequence[int], names: Sequence[str]) -> list[Record]:
    found = []
    for turn, (seed, share) in enumerate((seed, share) for seed in seeds for share in LOADS):
        for name in harness.in_turn(names, turn):
            found.append({"entry": name, "seed": seed, "load": share, "rate_rps": round(share * rate, 2)})
    return found


def summarized(rows: Sequence[Record]) -> list[Record]:
    """Return means and ranges over repeats by entry and load, and ratios to other entries on the same chats."""
    found = []
    for load in LOADS:
        for name in ENTRIES:
            mine = [row for row in rows if (row["entry"], row["load"]) == (name, load)]
            if mine:
                found.append({"load": load, "entry": name, "repeats": len(mine), **spread(mine), **ratios(rows, mine)})
                found[-1] |= counted(mine)
    return found


def spread(mine: Sequence[Record]) -> Record:
    """Return mean, minimum and maximum over repeats."""
    found: Record = {}
    for field in ("normalized_latency_s", "ttft_s", "jct_s", "short_jct_s", "long_jct_s"):
        for key in ("mean", "p95"):
            values = [row["measured"][field][key] for row in mine]
            found[f"{field}.{key}"] = [round(one, 4) for one in (statistics.fmean(values), min(values), max(values))]
    return found


def counted(mine: Sequence[Record]) -> Record:
    """Return sums over repeats, and the mean figures of the forecasts."""
    runs = [row["measured"] for row in mine]
    found: Record = {name: sum(run[name] for run in runs) for name in (*COUNTERS, "output_tokens", "other_texts")}
    found["lost"] = sum(run["requests"]["submitted"] - run["requests"]["finished"] for run in runs)
    found["steps_per_s"] = [round(run["steps"] / run["duration_s"]) for run in runs]
    made = [run["forecast"] for run in runs if "forecast" in run]
    if made:
        figures = ("error_octaves", "coverage", "late", "mean_ms")
        found |= {name: round(statistics.fmean(one[name] for one in made), 3) for name in figures}
    return found


def ratios(rows: Sequence[Record], mine: Sequence[Record]) -> Record:
    """Return the ratios of mean normalized latencies to `fcfs` and `fastserve`, by repeat."""

    def latency(row: Record) -> float:
        value: float = row["measured"]["normalized_latency_s"]["mean"]
        return value

    found: Record = {}
    for other in ("fcfs", "fastserve"):
        theirs = {(row["seed"], row["load"]): latency(row) for row in rows if row["entry"] == other}
        pairs = [(latency(row), theirs.get((row["seed"], row["load"]))) for row in mine]
        found[f"over_{other}"] = [round(value / base, 3) for value, base in pairs if base]
    return found


def show(row: Record) -> None:
    found = row["measured"]
    line = f"{row['entry']:14} seed {row['seed']} {row['rate_rps']:6.2f} req/s"
    for name in ("normalized_latency_s", "ttft_s", "jct_s"):
        line += f"  {name.removesuffix('_s')} {found[name]['mean']:.3f} (P95 {found[name]['p95']:.3f})"
    error = found.get("forecast", {}).get("error_octaves")
    harness.show(line, f" preempted {found['preemptions']}", f" error {error}" if error else "")


def main() -> None:
    parser = harness.parser(__doc__, requests=120, repeats=2)
    parser.add_argument("--work", type=Path, required=True, help="folder of the preparation")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which no run starts")
    # With faster backends a step of the tiny model takes less time than HTTP needs for its tokens, so that the core of
    # client and API process decides the comparison.
    parser.add_argument("--attention", default="torch", help="attention backend; torch is the slowest")
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    args = parser.parse_args()
    work, seeds = Work(args.work, args.attention), range(args.repeats)
    until = time.monotonic() + args.seconds
    prepare(work, args.requests, seeds)
    rate = capacity(work, seeds)
    rows: list[Record] = harness.read_record(args.out).get("rows", [])
    done = {(row["entry"], row["seed"], row["load"]) for row in rows}
    remaining = [row for row in plan(rate, seeds, args.entries) if (row["entry"], row["seed"], row["load"]) not in done]
    header = harness.new_record(settings=settings(work, args.requests, seeds))
    while remaining and time.monotonic() < until:
        row = remaining.pop(0)
        rows.append(row | {"measured": measure(work, ENTRIES[row["entry"]], row["rate_rps"], row["seed"])})
        show(rows[-1])
        harness.write_record(header | {"summary": summarized(rows), "rows": rows}, args.out)
    harness.show(f"{len(remaining)} runs remain")


def settings(work: Work, requests: int, seeds: Sequence[int]) -> Record:
    chats = [read_chats(work, seed) for seed in seeds]
    return {
        "attention": work.attention,
        "max_num_seqs": MAX_SEQS,
        "kv_gib": KV_GIB,
        "swap_gib": SWAP_GIB,
        "max_tokens": MAX_TOKENS,
        "requests": requests,
        "fcfs_rps": round(capacity(work, seeds), 3),
        "correct": [round(one.correct, 4) for one in chats],
        "reference_tokens": [sum(one.lengths) for one in chats],
    }


if __name__ == "__main__":
    main()
