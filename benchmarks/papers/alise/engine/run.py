"""ALISE on a real engine over HTTP, where the lengths of answers follow from the prompts.

    python benchmarks/papers/alise/engine/run.py --work DIR --out FILE [--seconds S] [--requests 120] [--repeats 2]

The built-in model answers tasks of which four in five have a short answer, on one core. `skipjoin bench` sends them as
chats, greedy, all with the same generous `max_tokens`, at Poisson arrival times above what `fcfs` sustains. Every run
has a server of its own; recipes take turns at each rate, then all again with other tasks and arrival times. Within a
repeat and rate all runs send the same chats at the same times.

The preparation takes a profile of the machine, sends each repeat's chats to `fcfs` all at once, and teaches one server
with further chats. The first of these tells how many requests per second `fcfs` finishes, how long the answers truly
are, which only `alise-oracle` is told, and the texts that every other run is compared with. What the taught server
keeps is what runs named "taught" begin with; no chat in it comes again.

`--work` has what the preparation found, `--out` the result, which is written after every run. A command that is given
the same two goes on where the one before ended; `--seconds` is after how long it begins no further run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[4] / name) for name in ("benchmarks/papers/alise", "benchmarks", "tools"))
from served import Served

from builtin_tasks import Task, draw_task
from machine import describe_machine
from papers.recipes import SPELLED
from skipjoin.observe.record import percentile

Record = dict[str, Any]

# Few seats: it is they that requests wait for. The pool holds 1,296 tokens, so that four long answers, or those that
# were preempted beside the ones that run, do not fit together.
SEATS, KV_GIB, SWAP_GIB = 4, 0.005, 0.25
MAX_TOKENS = 900
# Of the requests, and characters of an answer: those between are in neither class.
SHORT_SHARE, SHORT_MOST, LONG_LEAST = 0.8, 60, 300
# Over what `fcfs` finishes.
LOADS = (1.2, 1.8)
TEACHING_SEED, PROFILE_S = 1000, 10
RUN_TIMEOUT_S = 280
# How often /metrics is read, and how many requests a point of the learning curve has.
POLL_S, BLOCK = 0.5, 50
SKIPJOIN = str(Path(sys.executable).with_name("skipjoin"))
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
    """A server to compare. taught: it begins with what another one learnt. told: it gets the true lengths."""

    recipe: str
    options: tuple[str, ...] = ()
    taught: bool = False
    told: bool = False


ENTRIES = {
    "fcfs": Entry("fcfs"),
    "fastserve": Entry("fastserve"),
    "alise": Entry("alise"),
    "alise, taught": Entry("alise", taught=True),
    "alise, int8": Entry("alise", ("--swap-dtype", "int8"), taught=True),
    "alise, prior": Entry("alise", ("--forecaster", "prior")),
    "alise-oracle": Entry("alise-oracle", ("--set", "oracle=max-tokens"), told=True),
}


# -- chats ------------------------------------------------------------------------------------------------


def tasks(count: int, seed: int) -> list[Task]:
    """Different tasks, mostly with a short answer."""
    draw, found = random.Random(seed), dict[str, Task]()
    while len(found) < count:
        short = draw.random() < SHORT_SHARE
        while not fits(task := draw_task(draw), short=short) or task.prompt in found:
            pass
        found[task.prompt] = task
    return list(found.values())


def fits(task: Task, *, short: bool) -> bool:
    """Whether an answer has the length of its class."""
    return len(task.answer) <= SHORT_MOST if short else len(task.answer) >= LONG_LEAST


def write_trace(path: Path, rows: Sequence[Task], lengths: Iterable[int]) -> None:
    """A trace of prompts for `skipjoin bench`."""
    lines = [{"prompt": task.prompt, "output_tokens": length} for task, length in zip(rows, lengths, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True, slots=True)
class Chats:
    """A repeat's chats: their trace, with true lengths, and the answer to each row. correct: share of right ones."""

    trace: Path
    outputs: list[str]
    lengths: list[int]
    correct: float


# -- one run ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What the preparation found. attention: the back end of the servers."""

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

    @contextmanager
    def server(self, entry: Entry, state: Path | str = "none") -> Iterator[Served]:
        """A fresh server. state: the folder of what it learnt."""
        options = ["--profile", str(self.profile), "--attention", self.attention]
        options += ["--recipe", SPELLED[entry.recipe], *entry.options]
        options += ["--max-num-seqs", str(SEATS), "--kv-cache-gib", str(KV_GIB), "--swap-space", str(SWAP_GIB)]
        # No request is refused: the comparison is about order.
        options += ["--max-num-queued-reqs", "100000", "--max-num-queued-tokens", "100000000"]
        with Served(*options, "--forecast-dir", str(state)) as server:
            yield server


def bench(server: Served, trace: Path, rate: float, seed: int, *, told: bool = False) -> tuple[Record, list[Record]]:
    """The record of a run of `skipjoin bench` over every row of a trace, and its requests."""
    body = {"ignore_eos": True} if told else {"max_tokens": MAX_TOKENS}
    requests = len(trace.read_text().splitlines())
    with tempfile.TemporaryDirectory() as folder:
        out, lines = Path(folder, "out.json"), Path(folder, "requests.jsonl")
        command = [SKIPJOIN, "bench", "--base-url", server.url, "--endpoint", "chat", "--trace", trace]
        command += ["--rates", rate, "--seeds", seed, "--requests", requests, "--warmup", 0]
        command += ["--extra-body", json.dumps(body), "--out", out, "--record-requests", lines]
        try:
            subprocess.run(
                [str(part) for part in command], check=True, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"skipjoin bench: {error.stderr}") from error
        (record,) = json.loads(out.read_text())
        return record, [json.loads(line) for line in lines.read_text().splitlines()]


class Watch:
    """Reads a server's `/metrics` now and then: how forecasts get better."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._samples: list[Counter[str]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.wait(POLL_S):
            self._samples.append(self._server.numbers())

    def end(self, requests: int) -> Counter[str]:
        """Stop when the server has counted all requests; its last numbers."""
        self._over.set()
        self._thread.join()
        until = time.monotonic() + 10
        while sum((last := self._server.numbers())[name] for name in ENDED) < requests:
            if time.monotonic() > until:
                raise RuntimeError(f"the server counted fewer than {requests} requests")
            time.sleep(0.1)
        self._samples.append(last)
        return last

    def curve(self) -> list[Record]:
        """The mean error of the forecasts, in octaves, by blocks of requests that ended."""
        found, before = [], Counter[str]()
        for sample in self._samples:
            judged = sample[JUDGED] - before[JUDGED]
            if judged >= BLOCK or (sample is self._samples[-1] and judged):
                error = (sample[ERROR] - before[ERROR]) / judged
                found.append({"requests": int(sample[JUDGED]), "error_octaves": round(error, 3)})
                before = sample
        return found


JUDGED, ERROR = "forecast_error_octaves_count", "forecast_error_octaves_sum"
ENDED = ("request_success_total stop", "request_success_total length")


def measure(work: Work, entry: Entry, rate: float, seed: int) -> Record:
    """One run: what client and server say of it."""
    chats = read_chats(work, seed)
    with tempfile.TemporaryDirectory(prefix="forecasts-") as folder:
        state = Path(folder, "state")
        if entry.taught:
            shutil.copytree(work.taught, state)
        with work.server(entry, state) as server:
            watch = Watch(server)
            record, lines = bench(server, chats.trace, rate, seed, told=entry.told)
            numbers = watch.end(record["requests"]["finished"])
    found: Record = {name: round_all(record[name]) for name in ("normalized_latency_s", "ttft_s", "jct_s")}
    found |= by_length(chats, lines)
    found |= {name: total(numbers, metric) for name, metric in COUNTERS.items()}
    found |= {
        "requests": record["requests"],
        "duration_s": round(record["duration_s"], 3),
        "lag_p99_s": record["client"]["lag_p99_s"],
        "output_tokens": sum(line["output_tokens"] for line in lines),
        "other_texts": sum(line["output"] != chats.outputs[line["row"]] for line in lines),
    }
    return found | forecasts(numbers, watch)


def forecasts(numbers: Counter[str], watch: Watch) -> Record:
    """How good the forecasts were; nothing for a server that makes none."""
    if not numbers[JUDGED]:
        return {}
    return {
        "forecast": {
            "error_octaves": round(numbers[ERROR] / numbers[JUDGED], 3),
            "coverage": round(numbers["forecast_interval_total inside"] / numbers[JUDGED], 3),
            "late": int(numbers["forecasts_late_total"]),
            "mean_ms": round(1e3 * numbers["forecast_seconds_sum"] / numbers["forecast_seconds_count"], 3),
            "curve": watch.curve(),
        }
    }


def total(numbers: Counter[str], metric: str) -> int:
    """A counter, summed over its labels."""
    return int(sum(value for name, value in numbers.items() if name.split()[0] == metric))


def by_length(chats: Chats, lines: list[Record]) -> Record:
    """The completion times of short answers and of long ones."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for line in lines:
        times[len(chats.outputs[line["row"]]) >= LONG_LEAST].append(line["ended_s"] - line["due_s"])
    return {f"{name}_jct_s": summary(times[long]) for name, long in (("short", False), ("long", True))}


def summary(values: list[float]) -> Record:
    return {"mean": round(statistics.fmean(values), 4), "p95": round(percentile(sorted(values), 95), 4)}


def round_all(figures: Record) -> Record:
    return {key: round(figures[key], 4) for key in ("mean", "p95")}


# -- preparation ------------------------------------------------------------------------------------------


def prepare(work: Work, requests: int, seeds: Sequence[int]) -> None:
    """Find what is not in the folder yet."""
    work.folder.mkdir(parents=True, exist_ok=True)
    if not work.profile.exists():
        command = [SKIPJOIN, "profile", "tally", "--out", work.profile, "--seconds", PROFILE_S, "--threads", 1]
        command += ["--kv-cache-gib", KV_GIB, "--max-num-seqs", SEATS, "--attention", work.attention]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    for seed in seeds:
        if not work.reference(seed).exists():
            answer_alone(work, requests, seed)
    if not work.taught.exists():
        teach(work, requests)


def answer_alone(work: Work, requests: int, seed: int) -> None:
    """Let `fcfs` answer a repeat's chats, all at once."""
    rows = tasks(requests, seed)
    write_trace(work.trace(seed), rows, [1] * requests)
    with work.server(ENTRIES["fcfs"]) as server:
        record, lines = bench(server, work.trace(seed), 1e4, seed)
    lines.sort(key=lambda line: line["row"])
    outputs, lengths = ([line[name] for line in lines] for name in ("output", "output_tokens"))
    write_trace(work.trace(seed), rows, lengths)
    correct = sum(output == task.answer for output, task in zip(outputs, rows, strict=True)) / requests
    found = {"throughput_rps": record["throughput_rps"], "correct": correct, "lengths": lengths, "outputs": outputs}
    work.reference(seed).write_text(json.dumps(found))
    print(f"chats of seed {seed}: fcfs finishes {record['throughput_rps']:.2f} per second", flush=True)


def teach(work: Work, requests: int) -> None:
    """Let a server learn from chats that are in no repeat."""
    known = {task.prompt for seed in range(100) if work.trace(seed).exists() for task in tasks(requests, seed)}
    rows = [task for task in tasks(requests, TEACHING_SEED) if task.prompt not in known]
    trace = work.folder / "teaching.jsonl"
    write_trace(trace, rows, [1] * len(rows))
    partial = work.folder / "taught.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with work.server(ENTRIES["alise"], partial) as server:
        bench(server, trace, 1e4, TEACHING_SEED)
    partial.rename(work.taught)
    print(f"a server learnt from {len(rows)} other chats", flush=True)


def read_chats(work: Work, seed: int) -> Chats:
    found = json.loads(work.reference(seed).read_text())
    return Chats(work.trace(seed), found["outputs"], found["lengths"], found["correct"])


def capacity(work: Work, seeds: Sequence[int]) -> float:
    """Requests per second that `fcfs` finishes when none has to arrive any more."""
    return statistics.fmean(json.loads(work.reference(seed).read_text())["throughput_rps"] for seed in seeds)


# -- all runs ---------------------------------------------------------------------------------------------


def plan(rate: float, seeds: Sequence[int], names: Sequence[str]) -> list[Record]:
    """All runs in their order; at every second rate entries take turns from the last to the first."""
    found = []
    for turn, (seed, share) in enumerate((seed, share) for seed in seeds for share in LOADS):
        for name in names[:: -1 if turn % 2 else 1]:
            found.append({"entry": name, "seed": seed, "load": share, "rate_rps": round(share * rate, 2)})
    return found


def summarized(rows: Sequence[Record]) -> list[Record]:
    """Means over repeats by entry and load, the smallest and largest repeat beside them, and latency over that of
    `fcfs` and `fastserve` with the same chats at the same times."""
    found = []
    for load in LOADS:
        for name in ENTRIES:
            mine = [row for row in rows if (row["entry"], row["load"]) == (name, load)]
            if mine:
                found.append({"load": load, "entry": name, "repeats": len(mine), **spread(mine), **ratios(rows, mine)})
                found[-1] |= counted(mine)
    return found


def spread(mine: Sequence[Record]) -> Record:
    """Mean, least and most over repeats."""
    found: Record = {}
    for field in ("normalized_latency_s", "ttft_s", "jct_s", "short_jct_s", "long_jct_s"):
        for key in ("mean", "p95"):
            values = [row["measured"][field][key] for row in mine]
            found[f"{field}.{key}"] = [round(one, 4) for one in (statistics.fmean(values), min(values), max(values))]
    return found


def counted(mine: Sequence[Record]) -> Record:
    """Sums over repeats, and the means of the forecasts' figures."""
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
    """Mean normalized latency over that of the two others, by repeat."""

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
    print(line, f" preempted {found['preemptions']}", f" error {error}" if error else "", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--requests", type=int, default=120, help="chats in a run")
    parser.add_argument("--repeats", type=int, default=2)
    # With the faster ones a step of the tiny model takes less time than HTTP does for its tokens, on the core that
    # client and API process share: then the comparison is of what a request costs there.
    parser.add_argument("--attention", default="torch", help="back end, of which torch is the slowest")
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, default=list(ENTRIES))
    args = parser.parse_args()
    work, seeds = Work(args.work, args.attention), range(args.repeats)
    until = time.monotonic() + args.seconds
    prepare(work, args.requests, seeds)
    rate = capacity(work, seeds)
    rows: list[Record] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    done = {(row["entry"], row["seed"], row["load"]) for row in rows}
    wanted = [row for row in plan(rate, seeds, args.entries) if (row["entry"], row["seed"], row["load"]) not in done]
    machine = describe_machine()
    while wanted and time.monotonic() < until:
        row = wanted.pop(0)
        rows.append(row | {"measured": measure(work, ENTRIES[row["entry"]], row["rate_rps"], row["seed"])})
        show(rows[-1])
        found = {"machine": machine, "settings": settings(work, args.requests, seeds)}
        found |= {"summary": summarized(rows), "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(wanted)} runs are left")


def settings(work: Work, requests: int, seeds: Sequence[int]) -> Record:
    """What all runs share."""
    chats = [read_chats(work, seed) for seed in seeds]
    return {
        "attention": work.attention,
        "max_num_seqs": SEATS,
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
