"""Choice of a library's multiplication kernel ("way") for a weight, measured once per shape and cached.

Ways round differently, so a weight keeps its way, in later processes too as long as the file exists.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence

from skipjoin.system.durable import is_sealed, locked, sealed, write_durably
from skipjoin.system.folders import cache_folder, is_trusted

_log = logging.getLogger(__name__)

# Numbered as in layer_ops.cpp.
WAYS = ("vectors", "floats", "tiles")
# A decode, a batch of decodes, and a prompt's chunk: the way with the smallest product of times is used for all.
ROWS = (1, 16, 128)
_RUNS = 3
_SEAL_BYTES = len(sealed(b""))


class Choices:
    def __init__(self, name: str) -> None:
        self._path = cache_folder() / f"products-{name}.json"
        self._known: dict[str, str] = {}

    def way(self, shape: str, ways: Sequence[str], seconds: Callable[[str, int], float]) -> str:
        if shape not in self._known and not is_trusted(self._path, "the table of ways to multiply"):
            self._known[shape] = fastest(ways, seconds)
        if shape not in self._known:
            with locked(self._path):  # lets processes that start together agree: one measures, and the others read
                self._known = self._read() | self._known
                if shape not in self._known:
                    self._known[shape] = fastest(ways, seconds)
                    self._write()
        return self._known[shape]

    def _read(self) -> dict[str, str]:
        try:
            content = self._path.read_bytes()
        except OSError:
            return {}
        found = json.loads(content[:-_SEAL_BYTES]) if is_sealed(content) else None
        if not isinstance(found, dict) or not set(found.values()) <= set(WAYS):
            _log.warning("%s is damaged: the ways to multiply are measured again", self._path)
            return {}
        return found

    def _write(self) -> None:
        try:
            write_durably(self._path, sealed(json.dumps(self._known, indent=1).encode()))
        except OSError as error:
            _log.warning(
                "%s cannot be written: the next start measures the ways to multiply again, and may choose others, "
                "which round differently: %s", self._path, error,
            )  # fmt: skip


def fastest(ways: Sequence[str], seconds: Callable[[str, int], float]) -> str:
    least = {(way, rows): math.inf for rows in ROWS for way in ways}
    for rows in ROWS:
        for _ in range(_RUNS):
            for way in ways:
                least[way, rows] = min(least[way, rows], seconds(way, rows))
    return min(ways, key=lambda way: math.prod(least[way, rows] for rows in ROWS))
