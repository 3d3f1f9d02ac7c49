"""The pulse of an engine process: bytes on a pipe to its parent, for as long as its loop turns.

A thread of the engine writes a byte every `PULSE_S`, so that a long step does not look like a hang. It stops while one
turn of the loop takes longer than `HangLimits.step_s`. A process that is stopped, or whose interpreter is blocked, has
no pulse either. After `hang_s` without one the parent has the process print the stacks of its threads, and kills it;
the rest follows as for any other death.
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

# Seconds between two beats.
PULSE_S = 0.5
# Seconds without a beat after which an engine counts as hung. It is not killed yet: a busy machine may be the reason.
HUNG_S = 5.0
# Seconds that a hung engine gets to print its stacks.
DUMP_S = 0.5
_DUMP_SIGNAL = signal.SIGUSR1
_MOST_BEATS = 1 << 16


class Pulse:
    """The engine's side. fd: the pipe; None: there is none. limit_s: longest turn of the loop that has a pulse.

    `turned` is called by the loop, `start` once, when the loop begins.
    """

    def __init__(self, fd: int | None, limit_s: float) -> None:
        self._fd = fd
        self._limit_s = limit_s
        self._turned_at = time.monotonic()

    def start(self) -> None:
        """Write the first beat, and more of them in a thread."""
        if self._fd is not None:
            self.turned()
            self._beat(self._fd)
            threading.Thread(target=self._run, args=(self._fd,), name="skipjoin-pulse", daemon=True).start()

    def turned(self) -> None:
        """The loop makes progress."""
        self._turned_at = time.monotonic()

    def _run(self, fd: int) -> None:
        while True:
            time.sleep(PULSE_S)
            if time.monotonic() - self._turned_at <= self._limit_s:
                self._beat(fd)

    def _beat(self, fd: int) -> None:
        with suppress(OSError):  # the parent has ended, or has not read for hours
            os.write(fd, b".")


class PulseReader:
    """The parent's side. The pipe's other end belongs to `Setup.pulse_fd` of the process that it starts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        fd, self.engine_fd = os.pipe()
        self._pipe = os.fdopen(fd, "rb", buffering=0)
        os.set_blocking(self.engine_fd, False)
        self._seen_at = clock()
        self._silent_s = 0.0

    def started(self) -> None:
        """The engine has its end of the pipe; this process needs it no more."""
        os.close(self.engine_fd)

    def wait(self) -> bool:
        """Wait for the first beat; False if the engine ends without one."""
        found = bool(self._pipe.read(1))
        self._seen_at = self._clock()
        return found

    def silent_s(self) -> float:
        """Seconds without a beat, as far as this process has looked for one: time in which it did not run itself does
        not count. To be called every `PULSE_S` or more often."""
        os.set_blocking(self._pipe.fileno(), False)
        now = self._clock()
        if self._pipe.read(_MOST_BEATS):  # None or nothing: there is no beat
            self._silent_s, self._seen_at = 0.0, now
            return 0.0
        self._silent_s += min(now - self._seen_at, 2 * PULSE_S)
        self._seen_at = now
        return self._silent_s

    def close(self) -> None:
        """Release the pipe. It may be called again."""
        self._pipe.close()


def print_stacks() -> None:
    """Have this process print the stacks of its threads when it crashes, and when its parent asks for them."""
    faulthandler.enable()
    faulthandler.register(_DUMP_SIGNAL)


def ask_for_stacks(pid: int) -> None:
    """Have an engine process print the stacks of its threads on standard error, within `DUMP_S`; one that is stopped is
    continued for it."""
    with suppress(ProcessLookupError):
        os.kill(pid, _DUMP_SIGNAL)
        os.kill(pid, signal.SIGCONT)


def end_hung(process: subprocess.Popen[bytes]) -> None:
    """Have a child print its stacks, and kill it."""
    ask_for_stacks(process.pid)
    time.sleep(DUMP_S)
    process.kill()
    process.wait()


def describe_hang(limits: HangLimits) -> str:
    """The end of an engine that was killed because it hung."""
    return (
        f"the engine process gave no sign of life for {limits.hang_s:g} s (--hang-timeout), or computed a step for "
        f"more than {limits.step_s:g} s (--step-timeout), and was killed; the log above has the stacks of its threads"
    )
