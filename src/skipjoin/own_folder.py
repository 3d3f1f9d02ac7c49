"""Temporary folders of a process, for its user alone. If it is killed, the next process removes them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
# Seconds that a process may take from making a folder to locking it.
_YOUNG_S = 60.0


class OwnFolder:
    """A new folder. Before it is made, folders of the same prefix are removed whose process has ended.

    A lock that the kernel releases with the process tells that, rather than a process id, which may be of another
    container.
    """

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        self.path = Path(self._folder.name)
        self._lock = (self.path / _LOCK).open("w")
        if fcntl is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
        self._lock.close()


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another process removes it, too
            if _is_ours(folder) and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid()


def _is_abandoned(folder: Path) -> bool:
    """Whether no process has its lock, and none is about to lock it."""
    if fcntl is None or time.time() - folder.stat().st_mtime < _YOUNG_S:
        return False
    with suppress(FileNotFoundError), (folder / _LOCK).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
