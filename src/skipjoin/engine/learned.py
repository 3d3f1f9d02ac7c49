from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from skipjoin.core.policy import Learned
from skipjoin.system.durable import make_private, write_durably

# Seconds from a change until it is saved, which is what a killed engine loses.
SAVE_EVERY_S = 10.0
# Maximum size of a state. That of `adaptive` takes less than 100 kB.
_MAX_BYTES = 4 << 20

_log = logging.getLogger(__name__)


def state_file(folder: str, model: str, recipe: str) -> Path:
    digest = hashlib.sha256(f"{model}\n{recipe}".encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", model)[-40:].strip("-.") or "model"
    return Path(folder) / f"{name}-schedule-{digest}.json"


class LearnedKeeper:
    """Keeps the learned state in a file. One thread owns it; files are written by another one."""

    def __init__(self, learned: Learned, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._learned = learned
        self._file = file
        self._clock = clock
        self._saved = learned.notes
        self._due = math.inf
        self._writer = ThreadPoolExecutor(1, "skipjoin-learned")
        self._writing: Future[None] | None = None
        self._is_failing = False

    def load(self) -> None:
        try:
            if self._file.stat().st_size > _MAX_BYTES:
                raise ValueError(f"it has more than {_MAX_BYTES} bytes")
            self._learned.restore(json.loads(self._file.read_bytes()))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            _log.warning("what the scheduler learned cannot be read from %s, and is learned again: %s", self._file, why)
        self._saved = self._learned.notes

    def save_if_due(self) -> None:
        if self._learned.notes == self._saved:
            return
        now = self._clock()
        if self._due == math.inf:
            self._due = now + SAVE_EVERY_S
        elif now >= self._due and (self._writing is None or self._writing.done()):
            self._save()

    def close(self) -> None:
        if self._learned.notes != self._saved:
            self._save()
        self._writer.shutdown()

    def _save(self) -> None:
        self._due, self._saved = math.inf, self._learned.notes
        self._writing = self._writer.submit(self._write, json.dumps(self._learned.state()).encode())

    def _write(self, content: bytes) -> None:
        try:
            make_private(self._file.parent)
            write_durably(self._file, content)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                _log.warning("what the scheduler learned cannot be saved in %s: %s", self._file, error.strerror)
            self._is_failing = True
