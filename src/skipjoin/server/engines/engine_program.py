"""The engine process as a program: its command, and its exit codes."""

from __future__ import annotations

import signal
import sys

ENGINE_COMMAND = (sys.executable, "-m", "skipjoin.server.engines.engine_process")
# How long OpenMP's threads spin for more work before they sleep. Its default, milliseconds, makes steps many times
# slower as soon as another process uses a core, the API process included. A value in the environment wins.
THREAD_WAITING = {"GOMP_SPINCOUNT": "2000"}
# The exit code of an engine whose API process does not answer.
ORPHANED = 3


def describe_end(code: int) -> str:
    """How the process ended, in words. code: negative for a signal."""
    if code < 0:
        return f"the engine process was killed by {signal.Signals(-code).name}"
    return f"the engine process ended with exit code {code}"
