"""Temporary folders of a process, for its user alone. If it is killed, the next process removes them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
# A folder is called so, before its prefix, until its process has locked it.
_NEW = "new-"
_MAX_TRIES = 8
# Seconds that a process may take from making a folder to locking it.
_YOUNG_S = 60.0


class OwnFolder:
    """A new folder. Before it is made, folders of the same prefix are removed whose process has ended.

    A lock that the kernel releases with the process tells that, rather than a process id, which may be of another
    container.
    """

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        for tries_left in reversed(range(_MAX_TRIES)):
            made = Path(tempfile.mkdtemp(prefix=_NEW + prefix))
            self._lock = (made / _LOCK).open("w")
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                self.path = made.rename(made.with_name(made.name.removeprefix(_NEW)))
                break
            except OSError:  # another user has taken the name
                self._lock.close()
                shutil.rmtree(made, ignore_errors=True)
                if not tries_left:
                    raise
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder. It may be called again."""
        self._remove()
        self._lock.close()


def _remove_abandoned(prefix: str) -> None:
    for start, least_age_s in ((prefix, 0.0), (_NEW + prefix, _YOUNG_S)):
        for folder in Path(tempfile.gettempdir()).glob(f"{start}*"):
            with suppress(OSError):  # another process removes it, too
                if _is_ours(folder) and _age_s(folder) >= least_age_s and _is_unlocked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid()


def _age_s(folder: Path) -> float:
    return time.time() - folder.stat().st_mtime


def _is_unlocked(folder: Path) -> bool:
    """Whether no process has its lock."""
    if fcntl is None:
        return False
    with suppress(FileNotFoundError), (folder / _LOCK).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
