from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from skipjoin.config import NOWHERE, ServerConfig
from skipjoin.server.batches.records import FolderLocked, NoSpace, StoreError, StoreUnavailable
from skipjoin.system.disk import has_space, is_full_error, why_not_written
from skipjoin.system.folders import cache_folder
from skipjoin.system.locks import HAS_LOCKS, lock_file

# Environment variable with the default folder. "none" disables batches.
FOLDER_VARIABLE = "SKIPJOIN_BATCH_DIR"
# Several times the bytes that a deletion adds to SQLite's log.
RESERVE_BYTES = 256 << 10
_RESERVE_FILE = "reserve"
# Free space below which a disk counts as full. SQLite's shared memory alone takes 32 KiB.
_MIN_BYTES = 64 << 10
LOCK_FILE = "lock"


def batch_folder(config: ServerConfig) -> Path | None:
    named = config.batch_dir or os.environ.get(FOLDER_VARIABLE)
    if named == NOWHERE:
        return None
    if named:
        return Path(named)
    return cache_folder() / "batches"


def is_named(config: ServerConfig) -> bool:
    return config.batch_db is not None or (config.batch_dir or os.environ.get(FOLDER_VARIABLE) or NOWHERE) != NOWHERE


def no_space(folder: Path) -> NoSpace:
    return NoSpace(f"disk full: no space is left for the batches' folder {folder}")


def as_store_error(error: OSError, folder: Path) -> StoreError:
    if is_full_error(error):
        return no_space(folder)
    return StoreUnavailable(f"the batches' folder cannot be used: {error.strerror}")


def is_full(folder: Path) -> bool:
    return not has_space(folder, _MIN_BYTES)


class Reserve:
    """Disk space for deletions, because SQLite writes before it frees anything."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _RESERVE_FILE

    @property
    def is_whole(self) -> bool:
        try:
            return self._file.stat().st_size >= RESERVE_BYTES
        except OSError:
            return False

    def fill(self) -> None:
        if not hasattr(os, "posix_fallocate"):
            return
        with suppress(OSError):
            file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for size in (RESERVE_BYTES, RESERVE_BYTES // 2, RESERVE_BYTES // 4):
                    with suppress(OSError):
                        os.posix_fallocate(file, 0, size)
                        return
            finally:
                os.close(file)

    def release(self) -> bool:
        try:
            size = self._file.stat().st_size
            self._file.unlink()
        except OSError:
            return False
        return size > 0


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
            raise StoreError(
                f"the batches' folder {folder} cannot be used: {why_not_written(error, folder)}"
            ) from error
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
