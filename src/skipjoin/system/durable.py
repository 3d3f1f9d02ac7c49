"""Atomic and durable files. A killed writer leaves a temporary file, which a later writer removes."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skipjoin.system.locks import HAS_LOCKS, lock_file

_PREFIX = ".new-"
# Another user's symbolic link is not followed.
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
# Age in seconds from which a temporary file or folder counts as abandoned.
_ABANDONED_S = 3600.0
_DIGEST = hashlib.sha256


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically and durably, with permissions `mode` before the umask."""
    _remove_abandoned(path.parent)
    temporary = path.parent / f"{_PREFIX}{secrets.token_hex(8)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def make_private(folder: Path) -> None:
    """Create a folder and its parents with access for this user only, regardless of the umask."""
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # raises where it is a file


@contextmanager
def locked(path: Path, *, waits: bool = True) -> Iterator[str]:
    """Hold an exclusive lock of a cache file, so that one process creates it. Yield why it cannot be held, if so.

    Raises:
        BlockingIOError: Another process holds it, and `waits` is false.
    """
    try:
        make_private(path.parent)
        lock = os.fdopen(os.open(path.with_suffix(".lock"), _LOCK_FLAGS, 0o600), "w")
    except OSError as error:
        yield error.strerror or str(error)
        return
    with lock:
        if not lock_file(lock, waits=waits) and HAS_LOCKS:
            raise BlockingIOError
        yield ""


def scratch_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    _remove_abandoned(parent)
    return tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX)


def sealed(content: bytes) -> bytes:
    return content + _DIGEST(content).digest()


def is_sealed(content: bytes) -> bool:
    size = _DIGEST().digest_size
    return len(content) >= size and _DIGEST(content[:-size]).digest() == content[-size:]


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not supported by some file systems
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    for file in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process may remove it
            if time.time() - file.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
