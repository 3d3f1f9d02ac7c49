"""What a decode step costs around the model: Python, sampling, text, the engine's process and HTTP.

    python benchmarks/performance/model_step/around.py [--batches 1 16 64] [--repeats 5] [--out FILE]

The model of `random_model.py` in bfloat16, greedy, prompts of 64 tokens. `LLM` in this process and `skipjoin serve` run
the same requests in turns. `llm`: milliseconds of a step by part, in the wall time of a run. `decide` and `settle` are
the engine core's; `there` and `back` the ways to the model's thread and from it; `pack`, `forward`, `sample` and
`begin`, the rest of `Worker.begin`, that thread's; `finish` reads the tokens. `text` makes text of them, while the next
step runs; `rest` is what remains, less what ran at the same time. `http`: milliseconds of processor time in a step, as
the kernel counts it, of the API process, of the engine's process outside the model's threads, and of the client.
`http_over_llm`: the median of the ratios of their rates. Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine_throughput"))
from peers import LIMITS, Ours, OverHttp

import servers
from machine import describe_machine
from random_model import make_model
from skipjoin.engine.text import Choice
from workload import WorkloadSet

# Steps of a run, by batch: so that each takes a few seconds.
STEPS = {1: 256, 16: 128, 64: 64}
Figures = dict[str, Any]


class Stopwatch:
    """Begins and ends of calls, by part."""

    def __init__(self) -> None:
        self.spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time all calls of a method."""
        inner: Callable[..., Any] = getattr(owner, name)
        spans = self.spans

        def call(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **named)
            finally:
                spans[part].append((begin, time.perf_counter()))

        setattr(owner, name, call)

    def total(self, part: str) -> float:
        """Seconds of a part."""
        return sum(end - begin for begin, end in self.spans[part])

    def between(self, first: str, at: int, then: str) -> float:
        """Seconds from the beginnings (`at` 0) or ends (1) of one part to the beginnings of another."""
        pairs = zip(self.spans[first], self.spans[then], strict=True)
        return sum(later[0] - earlier[at] for earlier, later in pairs)


def watched(ours: Ours) -> Stopwatch:
    """Times the parts of this engine's steps."""
    watch = Stopwatch()
    engine = ours.llm.engine
    executor: Any = engine.executor
    worker = executor._worker
    watch.watch(engine.core, "start_step", "decide")
    watch.watch(engine.core, "finish_step", "settle")
    watch.watch(executor, "submit", "submit")
    watch.watch(worker, "begin", "begin")
    watch.watch(worker, "_packed", "pack")
    watch.watch(worker.model, "forward", "forward")
    watch.watch(worker._sampler, "sample", "sample")
    watch.watch(worker, "finish", "finish")
    watch.watch(Choice, "take", "text")
    return watch


def parts(watch: Stopwatch, seconds: float) -> dict[str, float]:
    """Milliseconds of a step by part."""
    steps = len(watch.spans["begin"])
    found = {name: watch.total(name) for name in ("decide", "pack", "forward", "sample", "finish", "settle", "text")}
    found["begin"] = watch.total("begin") - found["pack"] - found["forward"] - found["sample"]
    found["there"] = watch.between("submit", 0, "begin")
    found["back"] = watch.between("begin", 1, "finish")
    found["rest"] = seconds - sum(found.values())
    return {name: 1e3 * total / steps for name, total in found.items()} | {"step": 1e3 * seconds / steps}


class Clocks:
    """Processor time of a server's threads and of this process."""

    def __init__(self, pid: int) -> None:
        self._api = psutil.Process(pid)
        children = self._api.children(recursive=True)
        (self._engine,) = [child for child in children if "engine" in " ".join(child.cmdline())]

    def read(self) -> dict[str, float]:
        """Seconds so far. Of the engine's threads those count that do not compute: the first, and those of messages."""
        threads = self._threads(self._engine)
        host = [thread for thread, name in threads if thread == self._engine.pid or name.startswith("ZMQ")]
        return {
            "api": sum(self._seconds(self._api, thread) for thread, _ in self._threads(self._api)),
            "engine": sum(self._seconds(self._engine, thread) for thread in host),
            "client": time.process_time(),
        }

    def _threads(self, process: psutil.Process) -> list[tuple[int, str]]:
        tasks = Path(f"/proc/{process.pid}/task")
        return [(int(task.name), (task / "comm").read_text().strip()) for task in tasks.iterdir()]

    def _seconds(self, process: psutil.Process, thread: int) -> float:
        return int(Path(f"/proc/{process.pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def measure(ours: Ours, http: OverHttp, batch: int, repeats: int) -> Figures:
    """All figures of one batch size."""
    steps = STEPS.get(batch, 64)
    work = WorkloadSet([(64, steps)] * batch)
    clocks = Clocks(http.server.pid)
    watch = watched(ours)
    inside: list[dict[str, float]] = []
    outside: list[dict[str, float]] = []
    ratios = []
    for turn in range(-1, repeats):
        watch.spans.clear()
        seconds = ours.run(work.jobs(turn))
        inside.append(parts(watch, seconds))
        before = clocks.read()
        over_http = http.run(work.jobs(turn))
        after = clocks.read()
        outside.append({name: 1e3 * (after[name] - before[name]) / steps for name in after})
        outside[-1]["step"] = 1e3 * over_http / steps
        ratios.append(seconds / over_http)
    return {
        "batch": batch,
        "llm": medians(inside[1:]),
        "http": medians(outside[1:]),
        "http_over_llm": round(statistics.median(ratios[1:]), 3),
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part."""
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[*STEPS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        folder = Path(scratch) / "model"
        make_model(folder, torch.bfloat16)
        with servers.skipjoin(folder, *LIMITS) as server:
            for batch in args.batches:
                ours = Ours(folder)  # a fresh one: its parts are watched
                try:
                    results.append(measure(ours, OverHttp(server), batch, args.repeats))
                finally:
                    ours.llm.close()
                print(json.dumps(results[-1]), flush=True)
    if args.out:
        record = {"machine": describe_machine(), "results": results}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
