from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.progress import BarColumn

from skipjoin.cli.progress import Bars


def test_lines_have_each_task_and_come_no_more_often_than_asked() -> None:
    lines = ["runs: 0 of 4, now: 0 %", "runs: 1 of 4, now: 0 %", "runs: 1 of 4, now: 50 %"]
    for every_s, expected in ((0.0, lines), (60.0, [])):
        console = Console(file=StringIO())
        with Bars(BarColumn(), console=console, every_s=every_s) as bars:
            runs, now = bars.add_task("runs", total=None), bars.add_task("now", total=100)
            bars.update(runs, total=4)
            bars.update(runs, completed=1)
            bars.update(now, completed=50)
        assert console.file.getvalue().splitlines() == expected


def test_terminal_has_bars_and_no_lines() -> None:
    console = Console(file=StringIO(), force_terminal=True)
    with Bars("{task.description}", console=console, every_s=0.0) as bars:
        bars.update(bars.add_task("work", total=2), completed=1)
    assert "work:" not in console.file.getvalue()
