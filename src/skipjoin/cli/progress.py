from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TaskID

# Interval of the lines where stderr is no terminal.
LINE_EVERY_S = 5.0


def result_console(file_width: int = 160) -> Console:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = file_width
    return console


class Bars(Progress):
    """Progress bars on a terminal, else a line on stderr now and then."""

    def __init__(
        self,
        *columns: str | ProgressColumn,
        console: Console | None = None,
        line: Callable[[], str] | None = None,
        every_s: float = LINE_EVERY_S,
        **options: Any,
    ) -> None:
        console = console or Console(stderr=True)
        super().__init__(*columns, console=console, disable=not console.is_terminal, **({"transient": True} | options))
        self._line, self._every_s = line or self._of_tasks, every_s
        self._due = time.monotonic() + every_s

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self.disable and time.monotonic() >= self._due:
            self.say()

    def say(self) -> None:
        if self.disable:
            self._due = time.monotonic() + self._every_s
            print(self._line(), file=self.console.file, flush=True)

    def _of_tasks(self) -> str:
        return ", ".join(map(_described, self.tasks))


def _described(task: Task) -> str:
    counts = task.fields.get("counts")
    if counts:
        return f"{task.description}: {counts}"
    if not task.total:
        return f"{task.description} ..."
    is_counted = task.total > 1 and float(task.total).is_integer() and task.total != 100
    share = f"{task.completed:.0f} of {task.total:.0f}" if is_counted else f"{task.percentage:.0f} %"
    return f"{task.description}: {share}"


def stage_bars(bars: Bars) -> Callable[[str, float], None]:
    tasks: dict[str, TaskID] = {}

    def show(stage: str, share: float) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=1.0)
            if bars.disable:
                print(f"{stage} ...", file=sys.stderr, flush=True)
        bars.update(tasks[stage], completed=share)

    return show
