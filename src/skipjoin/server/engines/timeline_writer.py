from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from skipjoin.config import ConfigError
from skipjoin.core.events import Event
from skipjoin.observe.timeline import Timeline
from skipjoin.system.disk import why_not_written

logger = logging.getLogger(__name__)


class TimelineWriter:
    """A failed write is logged once and ends the timeline, not the engine."""

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by `_end`)
        except OSError as error:
            raise ConfigError(f"timeline {path} cannot be written: {error.strerror}") from error
        self._timeline: Timeline | None = Timeline(self._file)

    def observe(self, events: Iterable[Event]) -> None:
        self._write(lambda timeline: timeline.observe(events))

    def flush(self) -> None:
        self._write(Timeline.flush)

    def close(self) -> None:
        self._write(Timeline.close)
        self._end()

    def _write(self, act: Callable[[Timeline], None]) -> None:
        if self._timeline is None:
            return
        try:
            act(self._timeline)
        except OSError as error:
            logger.error(
                "the timeline %s ends here: %s", self._file.name, why_not_written(error, Path(self._file.name))
            )
            self._end()

    def _end(self) -> None:
        self._timeline = None
        with suppress(OSError):  # closing flushes, which fails after a failed write
            self._file.close()
