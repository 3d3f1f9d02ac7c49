"""Compare recipes on the real engine, with engines that take turns step by step in one process.

Servers that run one after the other meet different speeds of the machine. Here the engine whose clock is behind takes
the next step, and its clock runs only meanwhile, so all meet the same speeds. Cells are those of engine.py, without
HTTP; other cells of the record stay. Forecasts are made and learned while the clock stands, as another process does
that for a server. Copies between tiers continue while other engines compute.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from skipjoin.config import EngineConfig, ForecastConfig
from skipjoin.core.events import Finished, Token
from skipjoin.core.request import Request
from skipjoin.engine.build import assemble
from skipjoin.engine.forecasting import Predicted, chosen_forecasts, open_keeper
from skipjoin.engine.loop import EngineLoop
from skipjoin.sampling import SamplingParams
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.workload import synthetic

sys.path.insert(0, str(Path(__file__).parents[1]))
import harness
from arena.engine import BACKGROUND_TOKENS, BURST, CELLS, EngineCell, options, over_best
from random_model import scratch_model
from servers import full_rate

FIELDS = ("mean", "p95", "ttft_p50", "ttft_p95", "throughput_rps")


class TimedEngine:
    """Engine with a clock that runs only during its turns.

    Attributes:
        now: Seconds of all turns so far, and of waiting for arrivals.
    """

    def __init__(self, folder: Path, recipe: str, cell: EngineCell) -> None:
        limits = {"max_num_seqs": cell.seqs, "kv_cache_gib": cell.kv_gib, "swap_space_gib": 1.0}
        config = EngineConfig(model=str(folder), recipe=recipe, **limits)
        self.now = 0.0
        self._resumed: float | None = None
        engine = assemble(config)
        self._loop = EngineLoop(engine, clock=self._clock)
        forecasts = chosen_forecasts(ForecastConfig(forecast_dir="none"), config)
        self._keeper = None
        if forecasts is not None:
            self._keeper = open_keeper(forecasts, model=engine.info.model, folder=str(folder), text_of=str)
        self._ids = itertools.count()
        self._predicted: dict[int, Predicted] = {}
        self._background: set[int] = set()

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._loop.close()

    def start(self, jobs: Sequence[WorkloadRequest], background: int = 0) -> None:
        self._start = self.now
        self._waiting = deque(jobs)
        self._wanted = background
        self._arrivals: dict[int, float] = {}
        self._unanswered: dict[int, float] = {}
        self._ttfts: list[float] = []
        self.ends: list[float] = []
        self._latencies: list[float] = []

    @property
    def is_done(self) -> bool:
        return not (self._waiting or self._arrivals)

    def turn(self) -> None:
        """Add the requests that have arrived, and run a step."""
        while len(self._background) < self._wanted:
            self._background.add(self._add(60, BACKGROUND_TOKENS, self.now))
        if not (self._arrivals or self._background):
            self.now = max(self.now, self._start + self._waiting[0].at)
        while self._waiting and (at := self._start + self._waiting[0].at) <= self.now:
            job = self._waiting.popleft()
            number = self._add(job.prompt_tokens, job.output_tokens, at)
            self._arrivals[number] = self._unanswered[number] = at
        with self._running():
            events = self._loop.step()
        for event in events:
            if isinstance(event, Token) and (at := self._unanswered.pop(event.request.id, -1.0)) >= 0:
                self._ttfts.append(self.now - at)
            elif isinstance(event, Finished):
                self._finished(event.request)
        if self.is_done:
            for number in self._background:
                self._loop.abort(number)
            self._background.clear()

    def figures(self, duration_s: float) -> dict[str, float]:
        """Return what the run measured; `duration_s` is the window of the throughput."""
        latencies, ttfts = (statistics.quantiles(each, n=20) for each in (self._latencies, self._ttfts))
        throughput = sum(end <= duration_s for end in self.ends) / duration_s
        values = (statistics.fmean(self._latencies), latencies[-1], ttfts[9], ttfts[-1], throughput)
        return dict(zip(FIELDS, values, strict=True))

    def _clock(self) -> float:
        return self.now if self._resumed is None else self.now + time.perf_counter() - self._resumed

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._resumed = time.perf_counter()
        try:
            yield
        finally:
            self.now, self._resumed = self._clock(), None

    def _add(self, prompt_tokens: int, tokens: int, at: float) -> int:
        number = next(self._ids)
        prompt = random.Random(number).choices(range(100, 500), k=prompt_tokens)
        if self._keeper is not None:
            self._predicted[number] = self._keeper.forecast(prompt, tokens)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        with self._running():
            self._loop.add(number, prompt, params, age_s=self._clock() - at)
            if self._keeper is not None:
                self._loop.reforecast(number, self._predicted[number].forecast)
        return number

    def _finished(self, request: Request) -> None:
        tokens = len(request.progress.output)
        if self._keeper is not None and (predicted := self._predicted.pop(request.id)) and tokens:
            self._keeper.learn(predicted, tokens, exact=False)
        self._background.discard(request.id)
        if (at := self._arrivals.pop(request.id, None)) is not None:
            self._latencies.append((self.now - at) / tokens)
            self.ends.append(self.now - self._start)


def race(engines: Sequence[TimedEngine]) -> None:
    while waiting := [engine for engine in engines if not engine.is_done]:
        min(waiting, key=lambda engine: engine.now).turn()


def run_cell(name: str, args: argparse.Namespace, folder: Path, record: harness.Record) -> None:
    cell, recipes = CELLS[name], args.recipes
    _, lengths, *streams = cell.workload
    workload = synthetic(lengths, "poisson", streams[1::2])
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(TimedEngine(folder, recipe, cell))) for recipe in recipes]
        gc.freeze()
        first = engines[0]
        first.start([job._replace(at=0.0) for job in workload.draw(1.0, None, 100, BURST)])
        race([first])
        capacity = full_rate([{"ended_s": end} for end in first.ends])
        kept = record["cells"][name] = {"capacity_rps": round(capacity, 3), "rows": {one: [] for one in recipes}}
        for seed in args.seeds:
            jobs = workload.draw((cell.load or args.load) * capacity, args.duration, seed)
            latest = max(engine.now for engine in engines)
            for engine in engines:
                engine.now = latest
                engine.start(jobs, cell.background)
            race(engines)
            for recipe, engine in zip(recipes, engines, strict=True):
                kept["rows"][recipe].append(found := engine.figures(args.duration))
                harness.show(name, recipe, seed, {key: round(value, 5) for key, value in found.items()})
        rows = kept["rows"]
        pairs = zip(rows[recipes[-1]], rows[recipes[0]], strict=True)
        kept["median"] = {recipe: harness.medians(each, 5) for recipe, each in rows.items()}
        kept["over_best"] = over_best(rows, recipes)
        kept["over_first"] = harness.spreads([{key: one[key] / other[key] for key in FIELDS} for one, other in pairs])
        harness.show(name, kept["over_best"], kept["over_first"])
        harness.write_record(record, args.out)


def main() -> None:
    args = options(__doc__, load=1.6, duration=20.0).parse_args()
    known = harness.read_record(args.out).get("cells", {})
    record = harness.new_record(duration_s=args.duration, load=args.load, cells=known)
    with scratch_model(torch.bfloat16) as folder:
        for name in (one for one in CELLS if args.cells in one):
            run_cell(name, args, folder, record)


if __name__ == "__main__":
    main()
