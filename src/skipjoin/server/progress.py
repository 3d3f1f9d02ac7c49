from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.progress import Progress, TaskID

logger = logging.getLogger(__name__)


class ProgressDisplay:
    def __init__(self, *, has_bars: bool = True) -> None:
        is_terminal = has_bars and sys.stderr.isatty()
        self._bars = Progress(console=Console(stderr=True), transient=True) if is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._seen: set[str] = set()

    def update(self, what: str, share: float) -> None:
        if self._bars is None:
            if what not in self._seen:
                logger.info("%s ...", what)
            self._seen.add(what)
            return
        if what not in self._tasks:
            self._bars.start()
            self._tasks[what] = self._bars.add_task(what, total=1.0)
        self._bars.update(self._tasks[what], completed=share)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
