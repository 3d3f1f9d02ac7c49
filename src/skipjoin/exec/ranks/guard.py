"""Ends what would outlive this process if it were killed: the rest of a cluster of its own.

The kernel ends Ray's main processes with this one, but Ray's agents are their children, and look for them and for the
rest of the cluster for a minute. A guard is a process that waits for the end of this one. Then it kills all that have a
file in the cluster's folder open, as each of its processes has its log, and removes the folder. (Environment variables
would be no mark: Ray's processes overwrite theirs with their titles.)

As a program: `python guard.py FOLDER`; its standard input ends with the process that it is for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Who is started while others are killed is killed in the next round.
_ROUNDS, _ROUND_S = 20, 0.1


class ProcessGuard:
    """From now on, on Linux, no process that writes into the folder outlives this one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        if Path("/proc/self/fd").exists():
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", __file__, str(folder)),
                stdin=subprocess.PIPE,
                cwd="/",
                start_new_session=True,  # whoever signals this process's group does not mean it
            )

    def close(self) -> None:
        """Do now what is to be done at the end."""
        if self._process is not None:
            self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)  # where there is nobody to do it


def _writers(folder: str) -> Iterator[int]:
    """Processes with an open file in the folder."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it has ended, or is another user's
                if any(os.readlink(file).startswith(folder) for file in (process / "fd").iterdir()):
                    yield int(process.name)


def _main() -> None:
    folder, guarded = sys.argv[1], os.getppid()
    sys.stdin.buffer.read()
    for _ in range(_ROUNDS):
        found = [process for process in _writers(f"{folder}/") if process != guarded]
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not found:
            break
        time.sleep(_ROUND_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
