"""The part `experiment`: FastServe's claim on this card. OPT-13B's shape with random float16 weights and 11 GiB of KV,
ShareGPT's lengths, Poisson arrivals, the output lengths forced: the largest rate at which each recipe keeps the mean
normalized latency under ten decode iterations of a request that is alone (FastServe section 6.1).

The model is loaded once, and each run has an engine of its own around it, in this process: requests enter between
steps, as they do in the server. Rates are of one grid for all recipes, so that runs can be compared; each search begins
where the simulator, with a profile that was measured on this card before, sees the bound broken (moved by as much as it
was wrong about the recipe before), and ends between two neighbours of the grid of which the lower one keeps the bound
and the upper one does not. The figure is interpolated between them. What an earlier call measured with the same
settings on the same card is kept and gone on from.

Runs of half a minute say less of overload than long ones: see `long_runs.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import (
    BLOCK_SIZE,
    Figures,
    Task,
    backends,
    drive,
    folder_of,
    loaded_model,
    settings_for,
    shape_of,
    significant,
    slim,
)
from grid import FAR, next_place

from papers.recipes import SPELLED
from skipjoin.config import EngineConfig
from skipjoin.config.profile import read_profile, write_profile
from skipjoin.engine.build import engine_around
from skipjoin.engine.load import Loaded
from skipjoin.engine.profiling.profiler import Effort
from skipjoin.engine.profiling.startup import measure as measure_profile
from skipjoin.observe.record import Record
from skipjoin.recipes import own
from skipjoin.report.bound import Bound, MaximumRate, maximum_rate, parse_bound
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import Cell, Extent
from skipjoin.sim.experiments.simulation import run as simulate
from skipjoin.sim.experiments.sweep import RateSearch, sweep
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import Workload, WorkloadRequest, synthetic

MODEL, DTYPE = "opt-13b", "float16"
# In the order in which they are measured: what the paper compares, then the ablations.
RECIPES = (
    "fcfs",
    "fastserve",
    "srpt",
    "fastserve-reactive",
    "fastserve-recompute",
    "fastserve-defer",
    "sarathi",
)
# FastServe section 6.1: ten times the latency of a decode iteration under light load.
BOUND_FACTOR = 10
# Neighbouring rates of the grid differ by this factor.
_STRIDE = 1.1
_SEED = 0


@dataclass(frozen=True)
class Setting:
    """What all runs share, and what must be alike for runs of different calls to be put side by side.

    duration_s: in which requests arrive. until_s: end of a run; requests left then count with their age.
    """

    gpu: str
    kv_gib: float
    swap_gib: float
    lengths: str
    duration_s: float
    until_s: float
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    pipeline_depth: int = 2
    bound_factor: int = BOUND_FACTOR


def setting_of(task: Task, kv_bytes_per_token: int) -> Setting:
    """On a card the paper's; in a rehearsal as many requests on as little KV, but short ones."""
    if task.is_rehearsal:
        kv_gib = (3000 + BLOCK_SIZE) * kv_bytes_per_token / 2**30
        return Setting("rehearsal", kv_gib, 4 * kv_gib, "sharegpt*0.05", 1.0, 2.0)
    # Page-locked memory comes in powers of two; half of the RAM at most.
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    swap_gib = float(min(32, 2 ** math.floor(math.log2(max(2.0, ram / 2)))))
    return Setting(torch.cuda.get_device_name(), 11.0, swap_gib, "sharegpt", 30.0, 42.0)


class Bench:
    """A loaded model with what is known of it; None: only to simulate. profile: the file that the card's is in.
    workload: of all runs."""

    def __init__(self, loaded: Loaded | None, config: EngineConfig | None, setting: Setting, profile: Path) -> None:
        self._loaded, self._config, self._setting, self.profile = loaded, config, setting, profile
        self.workload: Workload = synthetic(setting.lengths, "poisson")
        self.bound_s = math.inf

    @property
    def bound(self) -> Bound:
        """On the mean normalized latency, as records tell it."""
        return parse_bound(f"normalized_latency_s.mean<={self.bound_s!r}")

    def measure_profile(self, effort: Effort) -> None:
        """Of this card, into the file."""
        assert self._loaded is not None
        assert self._config is not None
        write_profile(measure_profile(self._loaded, self._config, effort), self.profile)

    def light_load(self) -> list[float]:
        """Seconds of the decode iterations of requests that are alone."""
        job = WorkloadRequest(0.0, 160, 64, "default", 0)
        runs = [self._run("fcfs", [job], 60.0) for _ in range(4)]
        return [record["tpot_s"]["mean"] for record in runs[1:]]

    def measured(self, recipe: str, rate: float) -> Record:
        """What came of a run."""
        jobs = self.workload.draw(rate, self._setting.duration_s, _SEED)
        return self._run(recipe, jobs, self._setting.until_s)

    def cell(self, recipe: str, rate: float) -> Cell:
        """The same run in the simulator, with this card's profile."""
        extent = Extent(rate, self._setting.duration_s, _SEED, until_s=self._setting.until_s)
        return Cell(self._system(recipe), self.workload, extent)

    def _run(self, recipe: str, jobs: Sequence[WorkloadRequest], until_s: float) -> Record:
        assert self._loaded is not None
        assert self._config is not None
        config = dataclasses.replace(
            self._config,
            recipe=SPELLED[recipe],
            profile=str(self.profile),
            recipe_params=own(SPELLED[recipe], {"oracle": "max-tokens"}),
            **({"slo_s": self.bound_s} if math.isfinite(self.bound_s) else {}),
        )
        return drive(engine_around(self._loaded, config), jobs, until_s)

    def _system(self, recipe: str) -> System:
        setting = self._setting
        machine = Machine(
            hardware=str(self.profile),
            kv_gib=setting.kv_gib,
            swap_gib=setting.swap_gib,
            max_model_len=setting.max_model_len,
        )
        (found,) = machine.systems(
            SPELLED[recipe],
            slo_s=self.bound_s,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_tokens="exact",
            decision_s=0.0,  # one step is decided while another runs
        )
        return found


class _Silent:
    """Watches a sweep and says nothing."""

    def begun(self, number: int, cell: Cell) -> None: ...

    def share(self, number: int, share: float) -> None: ...

    def done(self, number: int, record: Record) -> None: ...


class _Predicted:
    """The simulator's search for the largest rate, which keeps what it saw."""

    def __init__(self, cell: Cell, bound: Bound) -> None:
        self._search, self._bound = RateSearch([cell], bound), bound
        self.seen: dict[float, list[Record]] = {}

    def first(self) -> Sequence[Cell]:
        return self._search.first()

    def then(self, cell: Cell, record: Record) -> Sequence[Cell]:
        self.seen.setdefault(record["workload"]["rate_rps"], []).append(record)
        return self._search.then(cell, record)

    @property
    def rate(self) -> MaximumRate | None:
        return maximum_rate(self.seen, self._bound)


def predictions(bench: Bench) -> dict[str, MaximumRate | None]:
    """Of all recipes, in processes of their own."""
    start = _first_rate(bench)
    plans = {recipe: _Predicted(bench.cell(recipe, start), bench.bound) for recipe in RECIPES}
    sweep(list(plans.values()), max(1, min(len(RECIPES), (os.cpu_count() or 1) // 2)), _Silent())
    return {recipe: plan.rate for recipe, plan in plans.items()}


def _first_rate(bench: Bench) -> float:
    """What `fcfs` finishes per second when all requests are there at once: near where its bound breaks."""
    cell = bench.cell("fcfs", 1.0)
    rate: float = simulate(dataclasses.replace(cell, extent=Extent(1e4, None, _SEED, 300)))["throughput_rps"]
    return rate


# -- the search -------------------------------------------------------------------------------------------


class Search:
    """All recipes' searches over one grid. rows: a row per run, measured and predicted."""

    def __init__(self, bench: Bench, base_rps: float, begins: Mapping[str, int], rows: list[Figures]) -> None:
        self._bench, self._base, self._begins, self.rows = bench, base_rps, begins, rows

    def next(self) -> tuple[str, int] | None:
        """The first recipe that is not done, and where to measure it."""
        for recipe in RECIPES:
            if (place := self._next_place(recipe)) is not None:
                return recipe, place
        return None

    def measure(self, recipe: str, place: int) -> None:
        """One run and its prediction."""
        rate, began = self._base * _STRIDE**place, time.monotonic()
        row: Figures = {"recipe": recipe, "place": place, "rate_rps": significant(rate)}
        row["measured"] = self._bench.measured(recipe, rate)
        row["took_s"] = significant(time.monotonic() - began)
        row["predicted"] = slim(simulate(self._bench.cell(recipe, rate)))
        self.rows.append(row)

    def largest(self, recipe: str, kind: str) -> MaximumRate | None:
        """What the rows say of the recipe."""
        points: dict[float, list[Record]] = {}
        for row in self.rows:
            if row["recipe"] == recipe:
                points.setdefault(row["rate_rps"], []).append(row[kind])
        return maximum_rate(points, self._bench.bound)

    def is_done(self, recipe: str) -> bool:
        """Whether there is nothing more to measure of it."""
        return self._next_place(recipe) is None

    def _next_place(self, recipe: str) -> int | None:
        tried = self._tried(recipe)
        return next_place(tried, next(iter(tried), self._begins[recipe] + self._shift()))

    def _shift(self) -> int:
        """By how much the simulator was off, on the grid, where it was measured last."""
        for recipe in reversed(RECIPES):
            holds = [place for place, held in self._tried(recipe).items() if held]
            if holds:
                return max(holds) - self._begins[recipe]
        return 0

    def _tried(self, recipe: str) -> dict[int, bool]:
        bound = self._bench.bound
        return {row["place"]: bound.holds(row["measured"]) for row in self.rows if row["recipe"] == recipe}


# -- all of it --------------------------------------------------------------------------------------------


def measure(task: Task) -> Figures:
    """Profile, light load, predictions, and as many runs as there is time for."""
    shape = shape_of(task, MODEL)
    setting = setting_of(task, shape.kv_bytes_per_token)
    with folder_of(shape, DTYPE) as folder:
        config = settings_for(
            task,
            folder,
            DTYPE,
            kv_cache_gib=setting.kv_gib,
            swap_space_gib=setting.swap_gib,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_model_len=setting.max_model_len,
            pipeline_depth=setting.pipeline_depth,
        )
        with loaded_model(config) as loaded:
            bench = Bench(loaded, config, setting, folder.parent / "profile.json")
            figures = _known(task, setting) or {"settings": dataclasses.asdict(setting), "rows": []}
            figures |= {"model": MODEL, **backends(loaded)}
            _prepare(task, bench, figures)
            task.keep(figures)
            _search(task, bench, setting, figures)
    return figures


def _known(task: Task, setting: Setting) -> Figures | None:
    """What an earlier call found, if it is of this card and these settings and got to its runs."""
    earlier = task.earlier
    same = earlier.get("settings") == json.loads(json.dumps(dataclasses.asdict(setting)))
    return dict(earlier) if same and "base_rps" in earlier else None


def _prepare(task: Task, bench: Bench, figures: Figures) -> None:
    """Profile, bound and predictions, unless they are known."""
    if "base_rps" in figures:
        bench.profile.write_text(json.dumps(figures["profile"]))
        read_profile(bench.profile)
        bench.bound_s = figures["bound_s"]
        return
    bench.measure_profile(Effort(min(20.0, 0.06 * task.seconds), 0.05))
    figures["profile"] = json.loads(bench.profile.read_text())
    figures["light_s"] = bench.light_load()
    figures["bound_s"] = bench.bound_s = significant(BOUND_FACTOR * median(figures["light_s"]))
    task.keep(figures)
    found = predictions(bench)
    base = found["fcfs"].rate_rps if found["fcfs"] is not None else _first_rate(bench)
    figures["base_rps"] = significant(base)
    figures["predicted_rps"] = {recipe: None if rate is None else str(rate) for recipe, rate in found.items()}
    figures["begins"] = {
        recipe: 0 if rate is None else max(-FAR, min(FAR, round(math.log(rate.rate_rps / base, _STRIDE))))
        for recipe, rate in found.items()
    }


def _search(task: Task, bench: Bench, setting: Setting, figures: Figures) -> None:
    search = Search(bench, figures["base_rps"], figures["begins"], figures["rows"])
    longest = setting.until_s
    while (following := search.next()) is not None and task.left_s > longest:
        began = time.monotonic()
        search.measure(*following)
        longest = max(longest, time.monotonic() - began)
        _tell(search, figures)
        task.keep(figures)
    _tell(search, figures)


def _tell(search: Search, figures: dict[str, Any]) -> None:
    """The largest rates as far as they are known."""
    told = {}
    for recipe in RECIPES:
        rate = search.largest(recipe, "measured") if any(row["recipe"] == recipe for row in search.rows) else None
        told[recipe] = {
            "measured": None if rate is None else str(rate),
            "predicted": figures["predicted_rps"][recipe],
            "runs": sum(row["recipe"] == recipe for row in search.rows),
            "done": search.is_done(recipe),
        }
    figures["largest_rate_rps"] = told
