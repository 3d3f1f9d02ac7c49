from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from skipjoin.cli.class_table import class_table, finished, mean_text, number_text
from skipjoin.cli.progress import Bars, result_console
from skipjoin.cli.requests_file import RequestsFile
from skipjoin.cli.tables import Table
from skipjoin.config import ConfigError
from skipjoin.observe.record import Record, preempted
from skipjoin.observe.timeline import Timeline
from skipjoin.report.bottleneck import NOTHING, limit_of
from skipjoin.report.bound import Bounds
from skipjoin.report.results import ResultsFile, basis_text, rate_of
from skipjoin.sim.experiments.cell import Cell
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.sweep import BoundSearch, OnRequests, ReplicaSearch
from skipjoin.system.disk import why_not_written

# Width of tables that are not printed to a terminal, and of the recipes' names there, which may be longer.
_FILE_WIDTH, _RECIPE_WIDTH = 120, 20
# Width of a further column, such as those of objectives.
_OBJECTIVE_WIDTH = 12
_COLUMNS = {
    "s/token": "normalized_latency_s.mean",
    "P95 s/token": "normalized_latency_s.p95",
    "TTFT s": "ttft_s.mean",
    "TPOT s": "tpot_s.mean",
    "reqs/step": "batch_mean",
    "KV share": "kv.used_mean",
}
# Columns in place of batch and KV where requests have objectives: the tail of each objective, and the share of requests
# that met it. The attainment of all comes last.
_OBJECTIVES = {
    "ttft": {"TTFT P95 s": "ttft_s.p95", "TTFT kept": "slo.ttft_attained"},
    "tpot": {"TPOT P95 s": "tpot_s.p95", "TPOT kept": "slo.tpot_attained"},
    "jct": {"JCT P95 s": "jct_s.p95", "JCT kept": "slo.jct_attained"},
}
_ALL_KEPT = {"all kept": "slo.all_attained"}
_HITS = {"prefix hits": "prefix.hit_rate"}
_ROLES = {
    "prompt tokens": "prompt_tokens",
    "batch": "batch_mean",
    "tokens a step": "forward.mean",
    "KV used": "kv.used_mean",
    "KV allocated": "kv.allocated_mean",
}
_TRANSFER = {"KV waits s": "wait_mean", "is sent s": "seconds_mean"}
_PROGRAMS = {
    "ended": "ended",
    "completion s": "completion_s.mean",
    "P95 completion s": "completion_s.p95",
    "s/call": "call_s",
    "recomputed tokens": "recomputed_tokens",
}
_PREDICTIONS = {"R of logs": "r_log", "MAE tokens": "mae", "in 25 %": "within_25", "in 80 % range": "coverage_80"}


class Goal(NamedTuple):
    search: type[BoundSearch]
    bounds: Bounds

    @property
    def replicas(self) -> bool:
        return self.search is ReplicaSearch


class SimulationReport:
    def __init__(self, results: ResultsFile | None, goal: Goal | None) -> None:
        self._results = results
        self._goal = goal
        self._records: dict[int, Record] = {}
        self._total = 0
        self._shares: dict[int, float] = {}  # finished share of runs in progress
        counts = TextColumn("{task.fields[counts]}", markup=False)
        self._bars = Bars(TextColumn("{task.description}", markup=False), BarColumn(), counts, TimeElapsedColumn())
        self._runs: TaskID = self._bars.add_task("runs", total=None, counts="")

    def __enter__(self) -> SimulationReport:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bars.stop()
        if kind is not None and self._total:
            print(f"{len(self._records)} of {self._total} runs were finished", file=sys.stderr)
        if self._records:
            if self._results is not None:
                self._results.sort(_sort_key)
                print(f"wrote {self._results.path}", file=sys.stderr)
            self._print()

    # -- callbacks of sweep -------------------------------------------------------------------------------

    def begun(self, number: int, cell: Cell) -> None:
        self._total += 1
        self._show(description=self._tried(cell))

    def share(self, number: int, share: float) -> None:
        if number not in self._records:
            self._shares[number] = share
            self._show()

    def done(self, number: int, record: Record) -> None:
        self._shares.pop(number, None)
        self._records[number] = record
        if self._results is not None:
            self._results.append(record)
        self._show()

    def _show(self, **changes: Any) -> None:
        finished = len(self._records)
        runs = finished + sum(self._shares.values())
        counts = f"{finished} of {self._total}, {runs / self._total:.0%}"
        self._bars.update(self._runs, total=self._total, completed=runs, counts=counts, **changes)

    def _tried(self, cell: Cell) -> str:
        if self._goal is None:
            return "runs"
        replicas, rate = cell.system.replicas, cell.extent.rate_rps
        at = "" if rate is None else f" at {number_text(rate)} req/s"
        return f"{cell.system.recipe}, {replicas} replica{'s' * (replicas != 1)}{at}"

    # -- the tables ---------------------------------------------------------------------------------------

    def _print(self) -> None:
        groups: dict[_Group, list[Record]] = defaultdict(list)
        for _, record in sorted(self._records.items()):
            groups[_group(record)].append(record)
        recipes = list(dict.fromkeys(group.recipe for group in groups))
        ordered = sorted(groups.items(), key=lambda item: (recipes.index(item[0].recipe), item[0][1:]))
        clusters = ["replicas"] if self._goal is not None and self._goal.replicas else []
        columns = _columns(list(self._records.values()))
        refused = ["rejected"] if any(record["requests"]["rejected"] for record in self._records.values()) else []
        table = Table(_recipe_column(), "req/s", *clusters, "finished", *refused, *columns, "preempted", box=None)
        for group, records in ordered:
            cells = [mean_text(records, field) for field in columns.values()]
            size = [str(group.replicas) for _ in clusters]
            preemptions = number_text(fmean(map(preempted, records)))
            counts = [str(_rejected(records)) for _ in refused]
            table.add_row(
                group.recipe, number_text(group.rate_rps), *size, finished(records), *counts, *cells, preemptions
            )
        wider = max(0, _OBJECTIVE_WIDTH * (len(columns) - len(_COLUMNS)))
        console = result_console(_FILE_WIDTH + wider + max(0, max(map(len, recipes)) - _RECIPE_WIDTH))
        console.print(table)
        for line in _rejections(ordered):
            console.print(line)
        answers = ordered if self._goal is None else list(_answers(ordered, self._goal))
        for line in (*bottlenecks(answers), *bases(self._records.values())):
            console.print(line, soft_wrap=True)
        if any("classes" in record for record in self._records.values()):
            rows = (((group.recipe, number_text(group.rate_rps)), records) for group, records in ordered)
            console.print(class_table((_recipe_column(), "req/s"), rows))
        if any("programs" in record for record in self._records.values()):
            console.print(_programs(ordered))
        if any("prediction" in record for record in self._records.values()):
            console.print(_predictions(ordered))
        if any("roles" in record for record in self._records.values()):
            console.print(_roles(ordered))
        if self._goal is not None:
            console.print((_minima if self._goal.replicas else _maxima)(ordered, self._goal.bounds))


def _columns(records: Sequence[Record]) -> dict[str, str]:
    hits = _HITS if any("prefix" in record for record in records) else {}
    judged = [name for name in _OBJECTIVES if any(record["slo"][f"{name}_attained"] is not None for record in records)]
    if not judged:
        return _COLUMNS | hits
    shown = {name: field for name, field in _COLUMNS.items() if name not in ("reqs/step", "KV share")}
    for name in judged:
        shown |= _OBJECTIVES[name]
    return shown | (_ALL_KEPT if len(judged) > 1 else {}) | hits


class _Group(NamedTuple):
    recipe: str
    rate: float  # 0 if the workload has its own times
    replicas: int

    @property
    def rate_rps(self) -> float | None:
        return self.rate or None


def _group(record: Record) -> _Group:
    return _Group(record["recipe"], rate_of(record) or 0.0, record["settings"]["replicas"])


_Groups = Sequence[tuple[_Group, list[Record]]]


def _rejected(records: Iterable[Record]) -> int:
    return sum(record["requests"]["rejected"] for record in records)


def _rejections(groups: _Groups) -> Iterator[str]:
    """Yield a line for each rate and limit, which most recipes share."""
    recipes: dict[str, list[str]] = defaultdict(list)
    for group, records in groups:
        if rejected := _rejected(records):
            settings, of = records[0]["settings"], sum(record["requests"]["submitted"] for record in records)
            context, pool = settings["max_model_len"], settings["kv_blocks"] * settings["block_size"]
            most = f"the context of {context} tokens" if context <= pool else f"the KV pool of {pool} tokens"
            at = "" if group.rate_rps is None else f" at {number_text(group.rate_rps)} req/s"
            recipes[f"{at}: {rejected} of {of} requests rejected: prompt and output exceed {most}"].append(group.recipe)
    for line, names in recipes.items():
        yield f" {', '.join(dict.fromkeys(names))}{line}"


def _answers(groups: _Groups, goal: Goal) -> Iterator[tuple[_Group, list[Record]]]:
    found: dict[tuple[str, float], tuple[_Group, list[Record]]] = {}
    # Smaller sizes come last, and so do larger rates.
    for group, records in sorted(groups, key=lambda item: -item[0].replicas if goal.replicas else item[0].rate):
        if goal.bounds.hold(records):
            found[group.recipe, group.rate if goal.replicas else 0.0] = (group, records)
    yield from found.values()


def _recipe_column() -> Column:
    return Column("recipe", overflow="fold")  # because names with parameters may differ at their end only


def _programs(groups: _Groups) -> Table:
    table = Table(_recipe_column(), "programs/s", *_PROGRAMS, box=None)
    for group, records in groups:
        cells = [mean_text(records, f"programs.{field}") for field in _PROGRAMS.values()]
        table.add_row(group.recipe, number_text(group.rate_rps), *cells)
    return table


def _predictions(groups: _Groups) -> Table:
    table = Table(_recipe_column(), "req/s", "predictor", *_PREDICTIONS, "T = T0 s + n (alpha s + beta), ms", box=None)
    for group, records in groups:
        if "prediction" not in records[0]:
            continue
        found = records[0]["prediction"]
        cells = [mean_text(records, f"prediction.{field}") for field in _PREDICTIONS.values()]
        time = found["execution"]
        terms = ", ".join(f"{number_text(1000 * time[name])}" for name in ("t0_s", "alpha_s", "beta_s"))
        shares = " and ".join(f"{time[name]:.3f}" for name in ("r2_prefill", "r2_decode"))
        table.add_row(group.recipe, number_text(group.rate_rps), found["predictor"], *cells, f"{terms}; R2 {shares}")
    return table


def _roles(groups: _Groups) -> Table:
    table = Table(_recipe_column(), "req/s", "replicas", *_ROLES, *_TRANSFER, box=None)
    for group, records in groups:
        sent = [mean_text(records, f"transfer.{field}") for field in _TRANSFER.values()]
        for role, part in records[0].get("roles", {}).items():
            cells = [mean_text(records, f"roles.{role}.{field}") for field in _ROLES.values()]
            table.add_row(group.recipe, number_text(group.rate_rps), f"{part['replicas']} {role}", *cells, *sent)
            sent = [""] * len(sent)
    return table


def _maxima(groups: _Groups, bounds: Bounds) -> Table:
    table = Table(_recipe_column(), f"largest req/s with {bounds}", "to the first", box=None)
    first: float | None = None
    points: dict[str, dict[float, list[Record]]] = defaultdict(dict)
    for group, records in groups:
        if group.rate_rps is not None:
            points[group.recipe][group.rate_rps] = records
    for recipe, rates in points.items():
        found = bounds.maximum_rate(rates)
        first = first if first is not None or found is None else found.rate_rps
        ratio = f"{found.rate_rps / first:.2f}x" if found is not None and first else "-"
        table.add_row(recipe, "none" if found is None else str(found), ratio)
    return table


def _minima(groups: _Groups, bounds: Bounds) -> Table:
    table = Table(_recipe_column(), "req/s", f"fewest replicas with {bounds}", "to the first", box=None)
    first: dict[float, int] = {}  # by rate
    points: dict[tuple[str, float], dict[int, list[Record]]] = defaultdict(dict)
    for group, records in groups:
        points[group.recipe, group.rate][group.replicas] = records
    for (recipe, rate), sizes in points.items():
        found = bounds.minimum_replicas(sizes)
        if found is None:
            table.add_row(recipe, number_text(rate or None), "none", "-")
        else:
            ratio = found / first.setdefault(rate, found)
            table.add_row(recipe, number_text(rate or None), str(found), f"{ratio:.2f}x")
    return table


def single_run(cell: Cell, report: SimulationReport, path: Path, on_requests: OnRequests | None) -> None:
    report.begun(0, cell)
    try:
        with path.open("w", encoding="utf-8") as file:
            timeline = Timeline(file)
            record = run(
                cell,
                on_share=lambda share: report.share(0, share),
                on_events=timeline.observe,
                on_requests=None if on_requests is None else partial(on_requests, 0, cell),
            )
            timeline.close()
    except OSError as error:
        raise ConfigError(f"timeline {path}: {why_not_written(error, path)}") from error
    report.done(0, record)
    print(f"wrote {path}", file=sys.stderr)


@contextmanager
def kept_requests(file: RequestsFile | None) -> Iterator[OnRequests | None]:
    if file is None:
        yield None
        return

    def keep(number: int, cell: Cell, requests: Iterable[Record]) -> None:
        extent, system = cell.extent, cell.system
        run = {"recipe": system.recipe, "replicas": system.replicas, "rate_rps": extent.rate_rps, "seed": extent.seed}
        file.append_in_order(number, run, requests)

    try:
        yield keep
    finally:
        file.close()
        print(f"wrote {file.path}", file=sys.stderr)


def _sort_key(record: Record) -> tuple[str | float, ...]:
    return (record["hardware"], *_group(record), record["workload"]["seed"])


def bottlenecks(groups: Iterable[tuple[tuple[str, float, int], Sequence[Record]]]) -> Iterator[str]:
    """Yield a line per rate and size of what requests of each recipe wait for."""
    points: dict[tuple[float, int], dict[str, tuple[str, float]]] = defaultdict(dict)
    for (recipe, rate, replicas), records in groups:
        if (found := limit_of(records)) is not None:
            points[rate, replicas][recipe] = found
    for (rate, replicas), recipes in sorted(points.items()):
        at = f" at {number_text(rate)} req/s" if rate else ""
        at += f" on {replicas} replicas" if replicas > 1 else ""
        limits = {limit for limit, _ in recipes.values()}
        if limits <= {NOTHING, "compute"}:
            more = "; compute is the bottleneck" if "compute" in limits else ""
            yield f" nothing waits{at}, so recipes cannot differ here{more}"
            continue
        shown = ", ".join(f"{recipe} {limit} ({share:.0%})" for recipe, (limit, share) in recipes.items())
        yield f" bottleneck{at}, with the share of latency that is waiting: {shown}"


def bases(records: Iterable[Record]) -> Iterator[str]:
    for basis in dict.fromkeys(map(basis_text, records)):
        yield f" {basis}"
