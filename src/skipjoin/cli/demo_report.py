from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from skipjoin.cli.progress import Bars, result_console
from skipjoin.cli.tables import Table
from skipjoin.config import ConfigError
from skipjoin.demo.load import MixedLoad
from skipjoin.demo.outcome import Outcome, headline, verdict
from skipjoin.demo.picture import save_demo
from skipjoin.demo.tables import Cells, conditions, figures_table, page, waits_table
from skipjoin.loadtest.client import ClientProgress
from skipjoin.report.results import ResultsFile
from skipjoin.system.disk import why_not_written
from skipjoin.system.durable import write_durably

_FILE_WIDTH = 120  # width of tables that are not printed to a terminal


class DemoReport:
    def __init__(self, folder: Path, command: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"out: {folder}: {why_not_written(error, folder)}") from error
        self._folder, self._command = folder, command
        self._results = ResultsFile(folder / "demo.json", existing="replace")
        self._outcomes: list[Outcome] = []
        self._load: MixedLoad | None = None
        # Redrawn on demand, because a refresh thread would delay the client's.
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
            auto_refresh=False,
        )
        self._task = self._bars.add_task("", total=None, counts="")

    @property
    def has_failures(self) -> bool:
        return any(outcome.failed for outcome in self._outcomes)

    def __enter__(self) -> DemoReport:
        self._say("the demo takes about two minutes; it downloads nothing")
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        if self._outcomes and self._load is not None:
            self._write(self._load)

    # -- callbacks of the runs ------------------------------------------------------------------------------

    def stage(self, text: str) -> None:
        self._bars.reset(self._task, description=text, total=None, counts="")
        self._bars.refresh()
        if self._bars.disable:
            self._say(f"{text} ...")

    def sized(self, load: MixedLoad, token_s: float) -> None:
        self._load = load
        self._say(
            f"{token_s * 1000:.0f} ms per token in a full batch: {load.background} background jobs of "
            f"{load.background_tokens} tokens, and {load.chats} chats within {load.duration_s:.0f} s"
        )

    def progress(self, progress: ClientProgress) -> None:
        counts = f"{progress.done} of {progress.total} requests done"
        self._bars.update(self._task, total=progress.total, completed=progress.done, counts=counts, refresh=True)

    def done(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._results.append(outcome.record)
        failures = [exchange.failure for exchange in outcome.exchanges if exchange.failure is not None]
        examples = {failure.kind: failure.detail for failure in failures}
        for kind, count in Counter(failure.kind for failure in failures).items():
            self._say(f"{outcome.name}: {count} requests failed: {kind}: {examples[kind]}")

    def _say(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    # -- results --------------------------------------------------------------------------------------------

    def _write(self, load: MixedLoad) -> None:
        tables = [table for table in (figures_table(self._outcomes), waits_table(self._outcomes)) if table is not None]
        picture, html = self._folder / "demo.svg", self._folder / "demo.html"
        save_demo(self._outcomes, picture)
        title, why = headline(self._outcomes), verdict(self._outcomes)
        lines = conditions(load, self._outcomes, self._command)
        text = page(title, why, picture.read_text(encoding="utf-8"), tables, lines)
        try:
            write_durably(html, text.encode(), mode=0o644)
        except OSError as error:
            raise ConfigError(f"out: {html}: {why_not_written(error, html)}") from error
        console = result_console(_FILE_WIDTH)
        for table in tables:
            console.print(f"{table.title}:")
            console.print(_printed(table))
        console.print(f"{title}.")
        console.print(why)
        for path in (picture, html, self._results.path):
            print(f"wrote {path}", file=sys.stderr)


def _printed(cells: Cells) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, name in enumerate(cells.columns):
        table.add_column(name, justify="right" if number else "left")
    for row in cells.rows:
        table.add_row(*row)
    return table
