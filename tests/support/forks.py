"""Processes that fork where a program would start Python and import what its parent has imported."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar


def fork(name: str, environment: Mapping[str, str], keeps: Mapping[int, int], run: Callable[[], int]) -> int:
    """Run a function in a child with the descriptors and signals of a new program, and return the child's id.

    Args:
        name: Name of the process, whose command line is that of its parent.
        keeps: Descriptors of the child by those of the parent. It has the standard ones, too.
    """
    if (child := os.fork()) != 0:
        return child
    try:
        gc.freeze()  # a collection would close descriptors that the parent's objects had, by their numbers
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        for own, theirs in keeps.items():
            os.dup2(own, theirs)
        close_others({0, 1, 2, *keeps.values()})
        Path("/proc/self/comm").write_text(name)
        # Instead of those that capture the output of tests.
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        logging.root.handlers.clear()
        os.environ.clear()
        os.environ.update(environment)
        os._exit(run())
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def close_others(kept: Collection[int]) -> None:
    for descriptor in {*map(int, os.listdir("/proc/self/fd"))}.difference(kept):
        with suppress(OSError):  # that of the list is closed
            os.close(descriptor)


class ForkedProgram:
    """Stands in for `subprocess.Popen`. A subclass defines the name of the process and what it runs."""

    NAME: ClassVar[str]

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        stdin: int,
        **options: Any,
    ) -> None:
        theirs, own = os.pipe()
        keeps = {theirs: 0, 2: 1, **{kept: kept for kept in pass_fds}}
        self.pid = fork(self.NAME, env, keeps, lambda: self.run([*command], pass_fds))
        os.close(theirs)
        self.stdin = os.fdopen(own, "wb")
        if stdin == subprocess.DEVNULL:
            self.stdin.close()
        self._code: int | None = None
        self._waiting = threading.Lock()

    def run(self, command: list[str], pass_fds: Sequence[int]) -> int:
        """Return the exit code of the child."""
        raise NotImplementedError

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, flags: int) -> int | None:
        with self._waiting:
            if self._code is None:
                pid, status = os.waitpid(self.pid, flags)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def as_module(program: type[ForkedProgram]) -> Any:
    """Return a stand-in for the module `subprocess`."""
    return type("Forks", (), {"Popen": program, "PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL})
