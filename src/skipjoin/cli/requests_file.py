"""The file of `--record-requests`: JSON lines, one per request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from skipjoin.bench.results import Existing
from skipjoin.config import ConfigError
from skipjoin.observe.record import Record


class RequestsFile:
    """Such a file, of one or several runs. existing: as in `ResultsFile`. Raises `ConfigError`."""

    def __init__(self, path: Path, existing: Existing) -> None:
        self.path = path
        try:
            self._file = path.open({"refuse": "x", "replace": "w", "extend": "a"}[existing], encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"{path} exists; name another file, or --overwrite or --append it") from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error

    def append(self, workload: Record, requests: Iterable[Record]) -> None:
        """The requests of a run."""
        run = {"rate_rps": workload["rate_rps"], "seed": workload["seed"]}
        self._file.writelines(json.dumps(run | request) + "\n" for request in requests)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
