from __future__ import annotations

import os
from pathlib import Path

from skipjoin.server.batches.disk import as_store_error
from skipjoin.server.batches.records import FolderLocked, NoSpace, StoreError
from skipjoin.system.locks import HAS_LOCKS, lock_file

LOCK_FILE = "lock"


class FolderLock:
    """Lock of a folder, `shared` by servers with one PostgreSQL database."""

    def __init__(self, folder: Path, *, shared: bool) -> None:
        if not HAS_LOCKS:
            raise StoreError("batches need a system with file locks, such as Linux")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if isinstance(full := as_store_error(error, folder), NoSpace):
                raise full from error
            raise StoreError(f"the batches' folder {folder} cannot be used: {error.strerror}") from error
        try:
            is_locked = lock_file(self._file, is_shared=shared, waits=False)
        except OSError as error:
            os.close(self._file)
            raise StoreError(f"the batches' folder {folder} cannot be locked: {error.strerror}") from error
        if not is_locked:
            os.close(self._file)
            raise FolderLocked(f"another server has the batches' folder {folder}")

    def close(self) -> None:
        os.close(self._file)
