from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.progress import BarColumn, TextColumn

from skipjoin.cli.class_table import class_table
from skipjoin.cli.progress import Bars, result_console
from skipjoin.cli.requests_file import RequestsFile
from skipjoin.cli.tables import Table
from skipjoin.loadtest.client import ClientProgress, Exchange
from skipjoin.loadtest.plan import LoadPlan
from skipjoin.loadtest.runs import TOO_LATE_S
from skipjoin.report.numbers import number
from skipjoin.report.results import Record, ResultsFile

_FILE_WIDTH = 120  # width of tables that are not printed to a terminal
_COLUMNS = ("req/s", "finished", "failed", "ms/token", "P95 ms", "TTFT s", "P95 s", "TPOT ms", "P95 ms", "lag ms")
_KEPT = "all kept"  # share of requests that met all objectives
_MS = 1000


class BenchReport:
    def __init__(self, plan: LoadPlan, results: ResultsFile | None, requests: RequestsFile | None) -> None:
        self._total = len(plan.runs())
        self._results = results
        self._requests = requests
        self._records: list[Record] = []
        self._begun = False
        # Redrawn on demand, because a refresh thread would delay the client's.
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[counts]}"),
            auto_refresh=False,
        )
        self._task = self._bars.add_task("warm-up", total=None, counts="")

    def __enter__(self) -> BenchReport:
        self._bars.start()
        self._bars.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        if self._requests is not None:
            self._requests.close()
        if self._begun and len(self._records) < self._total:
            print(f"{len(self._records)} of {self._total} runs were measured", file=sys.stderr)
        if self._records:
            if self._results is not None:
                print(f"wrote {self._results.path}", file=sys.stderr)
            console = result_console(_FILE_WIDTH)
            console.print(_table(self._records))
            if any("classes" in record for record in self._records):
                groups = (((_run_name(record["workload"]),), [record]) for record in self._records)
                console.print(class_table(("req/s",), groups))

    # -- callbacks of runs --------------------------------------------------------------------------------

    def begun(self, number: int, rate: float | None, seed: int) -> None:
        self._begun = True
        pace = "as recorded" if rate is None else f"{rate:g} req/s"
        self._bars.reset(self._task, description=f"run {number + 1}/{self._total}: {pace}, seed {seed}", counts="")

    def progress(self, progress: ClientProgress) -> None:
        counts = (
            f"{progress.sent}/{progress.total} sent, {progress.done - progress.failed} done, "
            f"{progress.failed} errors, lag {progress.lag * _MS:.1f} ms"
        )
        self._bars.update(self._task, total=progress.total, completed=progress.done, counts=counts, refresh=True)

    def done(self, record: Record, exchanges: Sequence[Exchange]) -> None:
        self._records.append(record)
        if self._results is not None:
            self._results.append(record)
        if self._requests is not None:
            run = {name: record["workload"][name] for name in ("rate_rps", "seed")}
            self._requests.append(run, (exchange.as_json() for exchange in exchanges))
        for line in _remarks(record, exchanges):
            self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _remarks(record: Record, exchanges: Sequence[Exchange]) -> Iterator[str]:
    where = _run_name(record["workload"])
    examples = {
        exchange.failure.kind: exchange.failure.detail for exchange in exchanges if exchange.failure is not None
    }
    for kind, count in record["client"]["errors_by_kind"].items():
        yield f"{where}: {count} of {record['requests']['submitted']} requests: {kind}: {examples[kind]}"
    lag = record["client"]["lag_p99_s"]
    if lag is not None and lag > TOO_LATE_S:
        yield (
            f"warning: {where}: requests left late (P99 {lag * _MS:.0f} ms): this client is the bottleneck, and the "
            "latencies, counted from when requests were due, are partly its own"
        )


def _table(records: Sequence[Record]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    is_judged = any(record["slo"]["all_attained"] is not None for record in records)
    for column, name in enumerate((*_COLUMNS, _KEPT) if is_judged else _COLUMNS):
        table.add_column(name, justify="right" if column else "left", no_wrap=True)
    for record in records:
        lag = _text(record["client"]["lag_p99_s"], _MS)
        table.add_row(_run_name(record["workload"]), *_row(record), lag, *_kept(record, is_judged))
        for name, part in record.get("classes", {}).items():
            table.add_row(f"  {name}", *_row(part), "", *_kept(part, is_judged))
    return table


def _row(part: dict[str, Any]) -> tuple[str, ...]:
    counts = part["requests"]
    figures = (("normalized_latency_s", _MS), ("ttft_s", 1), ("tpot_s", _MS))
    values = (_text(part[figure][key], scale) for figure, scale in figures for key in ("mean", "p95"))
    return (f"{counts['finished']}/{counts['submitted']}", f"{counts['rejected'] + counts['errors']}", *values)


def _kept(part: dict[str, Any], is_judged: bool) -> tuple[str, ...]:
    return (_text(part["slo"]["all_attained"], 1),) if is_judged else ()


def _run_name(workload: Record) -> str:
    rate = workload["rate_rps"]
    return f"seed {workload['seed']}" if rate is None else f"{rate:g} seed {workload['seed']}"


def _text(value: float | None, scale: float) -> str:
    return "-" if value is None else number(value * scale)
