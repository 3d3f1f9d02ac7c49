from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skipjoin.config import ConfigError
from skipjoin.observe.record import Record
from skipjoin.report.results import Existing
from skipjoin.system.disk import why_not_written


class RequestsFile:
    def __init__(self, path: Path, existing: Existing) -> None:
        self.path = path
        self._waiting: dict[int, tuple[Record, list[Record]]] = {}
        self._next = 0
        try:
            self._file = path.open({"refuse": "x", "replace": "w", "extend": "a"}[existing], encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"{path} exists; name another file, or --overwrite or --append it") from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error

    def append(self, run: Record, requests: Iterable[Record]) -> None:
        with self._explained():
            self._file.writelines(json.dumps(run | request) + "\n" for request in requests)
            self._file.flush()

    def append_in_order(self, number: int, run: Record, requests: Iterable[Record]) -> None:
        """Write the requests of runs that finish in any order, in the order of their numbers from 0."""
        self._waiting[number] = (run, list(requests))
        while (following := self._waiting.pop(self._next, None)) is not None:
            self.append(*following)
            self._next += 1

    def close(self) -> None:
        try:
            for _, waiting in sorted(self._waiting.items()):
                self.append(*waiting)
        finally:
            with self._explained():
                self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.path}: {why_not_written(error, self.path)}") from error
