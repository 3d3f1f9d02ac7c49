"""Guard that kills the processes of a private cluster if this process is killed, which ends its standard input.

Ray's child agents would keep looking for the cluster for a minute. The guard kills every process with an open file in
the cluster's folder, and removes the folder.
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

# Each round also kills processes that were started during the previous one.
_ROUNDS, _ROUND_S = 20, 0.1


class ProcessGuard:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        if Path("/proc/self/fd").exists():
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", __file__, str(folder)),
                stdin=subprocess.PIPE,
                cwd="/",
                start_new_session=True,  # signals to this process's group must not end it
            )

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)  # for systems without /proc


def _writers(folder: str) -> Iterator[int]:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # the process has exited, or belongs to another user
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
