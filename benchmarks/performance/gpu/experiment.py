"""The part `experiment`: FastServe's claim on this card.

The figure is the largest rate at which each recipe keeps the mean normalized latency under ten decode iterations of a
single request (FastServe section 6.1), for OPT-13B's shape with random float16 weights, 11 GiB of KV, ShareGPT's
lengths, Poisson arrivals and forced output lengths.

The model is loaded once, and each run has its own engine in this process: requests enter between steps, as in the
server. All recipes use one grid of rates. Each search begins at the rate that the simulator predicts with a profile of
this card, corrected by its error for the previous recipe, and ends between two neighbors of the grid of which only the
lower keeps the bound. The figure is interpolated between them. A call continues an earlier one with the same settings
and card.

Runs of half a minute show less of overload than long ones: see `long_runs.py`.
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
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run as simulate
from skipjoin.sim.experiments.sweep import RateSearch, sweep
from skipjoin.sim.experiments.system import System
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.workload import Workload, synthetic

MODEL, DTYPE = "opt-13b", "float16"
# In the order of measurement: the paper's comparison, then the ablations.
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
# Ratio of neighboring rates of the grid.
_STRIDE = 1.1
_SEED = 0


@dataclass(frozen=True)
class Setting:
    """Settings of all runs, which must be equal for calls to continue each other.

    Attributes:
        duration_s: Seconds of arrivals.
        until_s: End of a run; unfinished requests count with their age.
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
    """Return the paper's setting, or in a rehearsal one with short requests and little KV."""
    if task.is_rehearsal:
        kv_gib = (3000 + BLOCK_SIZE) * kv_bytes_per_token / 2**30
        return Setting("rehearsal", kv_gib, 4 * kv_gib, "sharegpt*0.05", 1.0, 2.0)
    # Page-locked memory has a size of a power of two, and at most half of the RAM.
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    swap_gib = float(min(32, 2 ** math.floor(math.log2(max(2.0, ram / 2)))))
    return Setting(torch.cuda.get_device_name(), 11.0, swap_gib, "sharegpt", 30.0, 42.0)


class Bench:
    """A loaded model with its profile and workload; without a model it only simulates."""

    def __init__(self, loaded: Loaded | None, config: EngineConfig | None, setting: Setting, profile: Path) -> None:
        self._loaded, self._config, self._setting, self.profile = loaded, config, setting, profile
        self.workload: Workload = synthetic(setting.lengths, "poisson")
        self.bound_s = math.inf

    @property
    def bound(self) -> Bound:
        """Bound on the mean normalized latency."""
        return parse_bound(f"normalized_latency_s.mean<={self.bound_s!r}")

    def measure_profile(self, effort: Effort) -> None:
        """Profile this card and write the profile."""
        assert self._loaded is not None
        assert self._config is not None
        write_profile(measure_profile(self._loaded, self._config, effort), self.profile)

    def light_load(self) -> list[float]:
        """Return the decode iterations of single requests in seconds."""
        job = WorkloadRequest(0.0, 160, 64, "default", 0)
        runs = [self._run("fcfs", [job], 60.0) for _ in range(4)]
        return [record["tpot_s"]["mean"] for record in runs[1:]]

    def measured(self, recipe: str, rate: float) -> Record:
        """Run a recipe at a rate and return the record."""
        jobs = self.workload.draw(rate, self._setting.duration_s, _SEED)
        return self._run(recipe, jobs, self._setting.until_s)

    def cell(self, recipe: str, rate: float) -> Cell:
        """Return the same run for the simulator, with this card's profile."""
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
            decision_s=0.0,  # scheduling overlaps with the previous step
        )
        return found


class _Silent:
    """Sweep watcher without output."""

    def begun(self, number: int, cell: Cell) -> None: ...

    def share(self, number: int, share: float) -> None: ...

    def done(self, number: int, record: Record) -> None: ...


class _Predicted:
    """Simulated search for the largest rate that keeps its records."""

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
    """Return the predicted largest rates of all recipes, computed in separate processes."""
    start = _first_rate(bench)
    plans = {recipe: _Predicted(bench.cell(recipe, start), bench.bound) for recipe in RECIPES}
    sweep(list(plans.values()), max(1, min(len(RECIPES), (os.cpu_count() or 1) // 2)), _Silent())
    return {recipe: plan.rate for recipe, plan in plans.items()}


def _first_rate(bench: Bench) -> float:
    """Return the requests per second that `fcfs` finishes when all are present at the start."""
    cell = bench.cell("fcfs", 1.0)
    rate: float = simulate(dataclasses.replace(cell, extent=Extent(1e4, None, _SEED, 300)))["throughput_rps"]
    return rate


# -- the search -------------------------------------------------------------------------------------------


class Search:
    """Searches of all recipes over one grid, with a row per run."""

    def __init__(self, bench: Bench, base_rps: float, begins: Mapping[str, int], rows: list[Figures]) -> None:
        self._bench, self._base, self._begins, self.rows = bench, base_rps, begins, rows

    def next(self) -> tuple[str, int] | None:
        """Return the first unfinished recipe and its next place on the grid."""
        for recipe in RECIPES:
            if (place := self._next_place(recipe)) is not None:
                return recipe, place
        return None

    def measure(self, recipe: str, place: int) -> None:
        """Measure one run and add its prediction."""
        rate, began = self._base * _STRIDE**place, time.monotonic()
        row: Figures = {"recipe": recipe, "place": place, "rate_rps": significant(rate)}
        row["measured"] = self._bench.measured(recipe, rate)
        row["took_s"] = significant(time.monotonic() - began)
        row["predicted"] = slim(simulate(self._bench.cell(recipe, rate)))
        self.rows.append(row)

    def largest(self, recipe: str, kind: str) -> MaximumRate | None:
        """Return the largest rate of a recipe."""
        points: dict[float, list[Record]] = {}
        for row in self.rows:
            if row["recipe"] == recipe:
                points.setdefault(row["rate_rps"], []).append(row[kind])
        return maximum_rate(points, self._bench.bound)

    def is_done(self, recipe: str) -> bool:
        """Return whether the search of a recipe is finished."""
        return self._next_place(recipe) is None

    def _next_place(self, recipe: str) -> int | None:
        tried = self._tried(recipe)
        return next_place(tried, next(iter(tried), self._begins[recipe] + self._shift()))

    def _shift(self) -> int:
        """Return the simulator's error on the grid for the last measured recipe."""
        for recipe in reversed(RECIPES):
            holds = [place for place, held in self._tried(recipe).items() if held]
            if holds:
                return max(holds) - self._begins[recipe]
        return 0

    def _tried(self, recipe: str) -> dict[int, bool]:
        bound = self._bench.bound
        return {row["place"]: bound.holds(row["measured"]) for row in self.rows if row["recipe"] == recipe}


# -- the part --------------------------------------------------------------------------------------------


def measure(task: Task) -> Figures:
    """Profile, measure light load, predict, and run as much as the time allows."""
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
    """Return the figures of an earlier call with this card and these settings, if it reached its runs."""
    earlier = task.earlier
    same = earlier.get("settings") == json.loads(json.dumps(dataclasses.asdict(setting)))
    return dict(earlier) if same and "base_rps" in earlier else None


def _prepare(task: Task, bench: Bench, figures: Figures) -> None:
    """Determine profile, bound and predictions unless an earlier call has them."""
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
        _summarize(search, figures)
        task.keep(figures)
    _summarize(search, figures)


def _summarize(search: Search, figures: dict[str, Any]) -> None:
    """Write the largest rates so far into the figures."""
    found = {}
    for recipe in RECIPES:
        rate = search.largest(recipe, "measured") if any(row["recipe"] == recipe for row in search.rows) else None
        found[recipe] = {
            "measured": None if rate is None else str(rate),
            "predicted": figures["predicted_rps"][recipe],
            "runs": sum(row["recipe"] == recipe for row in search.rows),
            "done": search.is_done(recipe),
        }
    figures["largest_rate_rps"] = found
