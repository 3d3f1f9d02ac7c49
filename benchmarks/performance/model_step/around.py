"""Measure what a decode step costs around the model: Python, sampling, text, the engine process and HTTP.

`LLM` in this process and `skipjoin serve` run the same greedy requests in turns: the model of `random_model.py` in
bfloat16, prompts of 64 tokens. Linux only.

`llm` has the milliseconds of a step by part, in wall time:

- `decide` and `settle`: the engine core.
- `pack`, `forward`, `sample`, and `begin` for the rest of `Worker.begin`.
- `finish`: reading the tokens.
- `text`: detokenization.
- `rest`: the remainder.

`http` has the processor time per step of the API process, of the engine's threads for messages, and of the client.
`over_forward` is the step over HTTP relative to `forward`, and `http_over_llm` the ratio of the rates, both as medians
of turns. The client reads at the end of a response only, so that it takes next to no processor time.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine_throughput"))
from peers import Ours, OverHttp, limits

import harness
from random_model import add_shape, scratch_model
from servers import Server, Skipjoin
from skipjoin.engine.text import Choice
from workload import FILL_UP, WorkloadSet, kv_gib_of

# Steps of a run by batch size, so that each run takes a few seconds.
STEPS = {1: 256, 16: 128, 64: 64}
Figures = dict[str, Any]


class Stopwatch:
    """Start and end times of calls, by part."""

    def __init__(self) -> None:
        self.spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def watch(self, owner: Any, name: str, part: str) -> None:
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
        if not self.spans[part]:
            raise RuntimeError(f"nothing was timed as {part!r}: the method that it watches is no longer called")
        return sum(end - begin for begin, end in self.spans[part])


def watched(ours: Ours) -> Stopwatch:
    watch = Stopwatch()
    engine = ours.llm.engine
    executor: Any = engine.executor
    worker = executor._worker
    watch.watch(engine.core, "start_step", "decide")
    watch.watch(engine.core, "finish_step", "settle")
    watch.watch(worker, "begin", "begin")
    watch.watch(worker, "_packed", "pack")
    watch.watch(worker.model, "wanted_rows", "forward")
    watch.watch(worker.model, "logits", "forward")
    watch.watch(worker._sampler, "sample", "sample")
    watch.watch(worker, "finish", "finish")
    watch.watch(Choice, "take", "text")
    return watch


def parts(watch: Stopwatch, seconds: float) -> dict[str, float]:
    steps = len(watch.spans["begin"])
    found = {name: watch.total(name) for name in ("decide", "pack", "forward", "sample", "finish", "settle", "text")}
    found["begin"] = watch.total("begin") - found["pack"] - found["forward"] - found["sample"]
    found["rest"] = seconds - sum(found.values())
    return {name: 1e3 * total / steps for name, total in found.items()} | {"step": 1e3 * seconds / steps}


class Clocks:
    """Processor time of a server's threads and of this process."""

    def __init__(self, server: Server) -> None:
        self._api = psutil.Process(server.process.pid)
        (self._engine,) = server.engines()

    def read(self) -> dict[str, float]:
        messages = [thread for thread, name in self._threads(self._engine) if name.startswith("ZMQ")]
        return {
            "api": sum(self._seconds(self._api, thread) for thread, _ in self._threads(self._api)),
            "messages": sum(self._seconds(self._engine, thread) for thread in messages),
            "client": time.process_time(),
        }

    def _threads(self, process: psutil.Process) -> list[tuple[int, str]]:
        tasks = Path(f"/proc/{process.pid}/task")
        return [(int(task.name), (task / "comm").read_text().strip()) for task in tasks.iterdir()]

    def _seconds(self, process: psutil.Process, thread: int) -> float:
        return int(Path(f"/proc/{process.pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def measure(ours: Ours, http: OverHttp, batch: int, repeats: int) -> Figures:
    steps = STEPS.get(batch, 64)
    work = WorkloadSet([(64, steps)] * batch)
    clocks = Clocks(http.server)
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
        ratios.append({"http_over_llm": seconds / over_http})
        ratios[-1]["over_forward"] = outside[-1]["step"] / inside[-1]["forward"]
    return {
        "batch": batch,
        "llm": harness.medians(inside[1:]),
        "http": harness.medians(outside[1:]),
        **harness.medians(ratios[1:]),
    }


def main() -> None:
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[*STEPS])
    add_shape(parser)
    args = parser.parse_args()
    record = harness.new_record(shape=args.shape, results=[])
    kv_gib = kv_gib_of(args.shape, torch.bfloat16)
    with scratch_model(torch.bfloat16, args.shape) as folder, Skipjoin(folder, *limits(kv_gib)) as server:
        OverHttp(server).run(FILL_UP(-1))
        for batch in args.batches:
            ours = Ours(folder, kv_gib)  # the stopwatch changes an engine, so each batch size gets its own
            ours.run(FILL_UP(-1))
            try:
                record["results"].append(measure(ours, OverHttp(server), batch, args.repeats))
            finally:
                ours.llm.close()
            harness.show(record["results"][-1])
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
