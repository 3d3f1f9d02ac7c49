"""The limit for blocking the event loop, adapted to the current speed of the machine."""

from __future__ import annotations

import json
import statistics
import time

STALL_S = 0.05  # documented in docs/api.md
# Time for parsing `_BODY` on an idle machine of the kind that STALL_S is meant for.
_USUAL_S = 0.003
_BODY = b"[" + b'{"a":1},' * 20_000 + b"1]"


def slowness() -> float:
    return max(1.0, statistics.median(_seconds() for _ in range(5)) / _USUAL_S)


def max_stall_s() -> float:
    return STALL_S * slowness()


def _seconds() -> float:
    begin = time.thread_time()
    json.loads(_BODY)
    return time.thread_time() - begin
