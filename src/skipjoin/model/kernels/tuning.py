"""Kernel size tuning. triton.autotune cannot run in the interpreter, and measures in the step that needs a kernel."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from skipjoin.system.durable import make_private, write_durably
from skipjoin.system.folders import cache_folder, is_trusted

_log = logging.getLogger(__name__)

# Sizes and launch options of a kernel, by argument name.
Config = Mapping[str, int]
# One call of a kernel; the argument is its index, from 0.
Call = Callable[[int], None]
# (call, number of turns) -> milliseconds of one call.
Timer = Callable[[Call, int], float]

_WARM_UP, _RUNS = 3, 15


def cuda_ms(call: Call, turns: int) -> float:
    """Return the median milliseconds of a call, from a graph, because launches from Python take longer."""
    for turn in range(_WARM_UP):
        call(turn % turns)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for turn in range(turns):
            call(turn)
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_RUNS)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times: list[float] = [begin.elapsed_time(end) for begin, end in events]
    return statistics.median(times) / turns


def source_hash(*files: str) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:12]


def table_path(device: str, version: str) -> Path:
    folder = os.environ.get("SKIPJOIN_KERNEL_CACHE") or cache_folder() / "kernels"
    return Path(folder) / f"{re.sub(r'[^A-Za-z0-9.]+', '-', device)}-{version}.json"


class TunedTable:
    """Size choices of one device, kept in the file `path` unless it is None or another user can change it."""

    def __init__(self, path: Path | None, timer: Timer = cuda_ms) -> None:
        self._path = path if path is not None and is_trusted(path, "the table of kernel sizes") else None
        self._timer = timer
        self._chosen = {} if self._path is None else _read(self._path)

    def known(self, name: str, source: str, key: Sequence[object]) -> bool:
        return _entry(name, source, key) in self._chosen

    def find(self, name: str, source: str, key: Sequence[object], configs: Sequence[Config]) -> Config:
        found = self._chosen.get(_entry(name, source, key))
        return next((config for config in configs if dict(config) == found), configs[0])

    def measure(
        self,
        name: str,
        source: str,
        key: Sequence[object],
        configs: Sequence[Config],
        run: Callable[[Config, int], None],
        turns: int = 1,
    ) -> Config:
        """Keep and return the fastest of `configs`; if none can run here, return the first and keep nothing."""
        times: dict[int, float] = {}
        for i, config in enumerate(configs):
            try:
                times[i] = self._timer(partial(run, config), turns)
            except Exception as error:  # errors of the compiler and the driver have no common class
                _log.info("%s cannot run with %s: %s", name, dict(config), error)
        if not times:
            return configs[0]
        best = configs[min(times, key=lambda i: (times[i], i))]
        self._chosen[_entry(name, source, key)] = dict(best)
        self._write()
        return best

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            make_private(self._path.parent)
            # Another process may have measured other keys in the meantime.
            self._chosen = {**_read(self._path), **self._chosen}
            write_durably(self._path, json.dumps(self._chosen, indent=1, sort_keys=True).encode())
        except OSError as error:
            _log.warning("the measured kernel sizes cannot be saved: %s", error)


def _entry(name: str, source: str, key: Sequence[object]) -> str:
    return "/".join((name, source, *map(str, key)))


def _read(path: Path) -> dict[str, dict[str, int]]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("the table of kernel sizes %s cannot be read and is ignored: %s", path, error)
        return {}
    if not isinstance(read, dict):
        _log.warning("the table of kernel sizes %s is not a JSON object and is ignored", path)
        return {}
    return read
