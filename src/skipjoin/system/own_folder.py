from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from skipjoin.system.locks import HAS_LOCKS, lock_file

_LOCK = ".lock"
# Additional prefix of a folder until its process has locked it.
_NEW = "new-"
_MAX_TRIES = 8
# Maximum time in seconds between creating and locking a folder.
_YOUNG_S = 60.0


class OwnFolder:
    """Temporary folder that is removed on exit.

    The constructor removes folders of killed processes, found by locks that the kernel releases: a process id may
    belong to another container.
    """

    def __init__(self, prefix: str) -> None:
        _remove_abandoned(prefix)
        for tries_left in reversed(range(_MAX_TRIES)):
            made = Path(tempfile.mkdtemp(prefix=_NEW + prefix))
            self._lock = (made / _LOCK).open("w")
            lock_file(self._lock)
            try:
                self.path = made.rename(made.with_name(made.name.removeprefix(_NEW)))
                break
            except OSError:  # the name is taken by another user
                self._lock.close()
                shutil.rmtree(made, ignore_errors=True)
                if not tries_left:
                    raise
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def close(self) -> None:
        self._remove()
        self._lock.close()


def _remove_abandoned(prefix: str) -> None:
    for start, min_age_s in ((prefix, 0.0), (_NEW + prefix, _YOUNG_S)):
        for folder in Path(tempfile.gettempdir()).glob(f"{start}*"):
            with suppress(OSError):  # another process may remove it
                if _is_ours(folder) and _age_s(folder) >= min_age_s and _is_unlocked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.getuid()


def _age_s(folder: Path) -> float:
    return time.time() - folder.stat().st_mtime


def _is_unlocked(folder: Path) -> bool:
    with suppress(FileNotFoundError), (folder / _LOCK).open("r+") as lock:
        return lock_file(lock, waits=False)
    return HAS_LOCKS
