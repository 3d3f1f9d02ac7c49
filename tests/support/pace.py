"""How long the event loop may be held, on a machine that may have other things to do."""

from __future__ import annotations

import json
import statistics
import time

STALL_S = 0.05  # docs/api.md
# What the machine that STALL_S is for takes for `_BODY`, when it has nothing else to do.
_USUAL_S = 0.003
_BODY = b"[" + b'{"a":1},' * 20_000 + b"1]"


def slowness() -> float:
    """How many times longer than usual this machine takes at present for the same work; at least 1."""
    return max(1.0, statistics.median(_seconds() for _ in range(5)) / _USUAL_S)


def max_stall_s() -> float:
    """STALL_S, or as many times longer as this machine is slow at present."""
    return STALL_S * slowness()


def _seconds() -> float:
    begin = time.thread_time()
    json.loads(_BODY)
    return time.thread_time() - begin
