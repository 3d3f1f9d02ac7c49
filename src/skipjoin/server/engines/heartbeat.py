"""Heartbeat of an engine process: bytes on a pipe to its parent.

A thread writes them, except while an iteration takes longer than `HangLimits.step_s`. After `HangLimits.hang_s` without
one, the process prints its stacks and is killed.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from skipjoin.config import HangLimits

# Interval of heartbeats.
HEARTBEAT_INTERVAL_S = 0.5
# Time without a heartbeat after which an engine counts as hung. A busy machine may be the reason, so it is not killed.
HUNG_S = 5.0
# Time for a hung engine to print its stacks.
DUMP_S = 0.5
_DUMP_SIGNAL = signal.SIGUSR1
_MAX_BEATS = 1 << 16


class Heartbeat:
    def __init__(self, fd: int | None, limit_s: float) -> None:
        self._fd = fd
        self._limit_s = limit_s
        self._turned_at = time.monotonic()

    def start(self) -> None:
        if self._fd is not None:
            self.turned()
            self._beat(self._fd)
            threading.Thread(target=self._run, args=(self._fd,), name="skipjoin-heartbeat", daemon=True).start()

    def turned(self) -> None:
        self._turned_at = time.monotonic()

    def _run(self, fd: int) -> None:
        while True:
            time.sleep(HEARTBEAT_INTERVAL_S)
            if time.monotonic() - self._turned_at <= self._limit_s:
                self._beat(fd)

    def _beat(self, fd: int) -> None:
        with suppress(OSError):  # the parent has exited, or the pipe is full because it has not read for hours
            os.write(fd, b".")


class HeartbeatReader:
    """Parent side. `engine_fd` is the engine's `Setup.heartbeat_fd`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        fd, self.engine_fd = os.pipe()
        self._pipe = os.fdopen(fd, "rb", buffering=0)
        os.set_blocking(self.engine_fd, False)
        self._seen_at = clock()
        self._silent_s = 0.0

    def started(self) -> None:
        os.close(self.engine_fd)

    def wait(self) -> bool:
        found = bool(self._pipe.read(1))
        self._seen_at = self._clock()
        return found

    def silent_s(self) -> float:
        """Return the seconds without a heartbeat in which this process ran. Call every `HEARTBEAT_INTERVAL_S`."""
        os.set_blocking(self._pipe.fileno(), False)
        now = self._clock()
        if self._pipe.read(_MAX_BEATS):  # None if the pipe is empty, b"" if the engine has closed it
            self._silent_s, self._seen_at = 0.0, now
            return 0.0
        self._silent_s += min(now - self._seen_at, 2 * HEARTBEAT_INTERVAL_S)
        self._seen_at = now
        return self._silent_s

    def close(self) -> None:
        self._pipe.close()


def print_stacks() -> None:
    faulthandler.enable()
    faulthandler.register(_DUMP_SIGNAL)


def ask_for_stacks(pid: int) -> None:
    """Make an engine process, even a stopped one, print its stacks within `DUMP_S`."""
    with suppress(ProcessLookupError):
        os.kill(pid, _DUMP_SIGNAL)
        os.kill(pid, signal.SIGCONT)


def end_hung(process: subprocess.Popen[bytes]) -> None:
    ask_for_stacks(process.pid)
    time.sleep(DUMP_S)
    process.kill()
    process.wait()


def describe_hang(limits: HangLimits) -> str:
    return (
        f"the engine process gave no sign of life for {limits.hang_s:g} s (--hang-timeout), or computed a step for "
        f"more than {limits.step_s:g} s (--step-timeout), and was killed; the log above has the stacks of its threads"
    )
