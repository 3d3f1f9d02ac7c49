"""A small disk that tests can fill. It is a tmpfs in its own mount namespace, which needs root and Linux."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path

_MOUNTS = 0x00020000  # CLONE_NEWNS
_CHUNK = b"x" * (64 << 10)


class SmallDisk:
    """A disk mounted on a folder, visible only to commands that begin with `enter`, and to those that `join` it."""

    def __init__(self, folder: Path, size: str) -> None:
        if shutil.which("unshare") is None or shutil.which("nsenter") is None:
            raise OSError("unshare and nsenter (util-linux) are not installed")
        mount = f"mount -t tmpfs -o size={size} none '{folder}' && echo mounted && exec sleep infinity"
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._process.stdout.readline() != b"mounted\n":
            self.close()
            raise OSError("a disk cannot be mounted here")
        # File of the namespace, and the beginning of a command that enters it.
        self.namespace = f"/proc/{self._process.pid}/ns/mnt"
        self.enter = ["nsenter", f"--mount={self.namespace}", "--"]
        # The folder as this process sees it.
        self.seen = Path(f"/proc/{self._process.pid}/root{folder}")
        self._filler = self.seen / "filler"

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            for size in (len(_CHUNK), 1):
                _write_all(file.fileno(), _CHUNK[:size])

    def empty(self) -> None:
        self._filler.unlink()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def join(namespace: str) -> None:
    """Let this process, which must have one thread only, see the mounts of a namespace; Python 3.11 has no `setns`."""
    with Path(namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _MOUNTS) != 0:
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")


def _write_all(file: int, data: bytes) -> None:
    try:
        while True:
            os.write(file, data)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
