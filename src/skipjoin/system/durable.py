"""Files that are whole after a power loss: written beside their place, synchronised, then renamed.

A writer that is killed leaves its temporary file or folder, which a later one removes.
"""

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

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX = ".new-"
# A link that someone else put there is not followed.
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
# Seconds after which a temporary file or folder belongs to no writer any more.
_ABANDONED_S = 3600.0
_DIGEST = hashlib.sha256


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file; whatever happens, it has the old content or the new one. mode: of the file, less the umask.
    Raises OSError."""
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
    """Make a folder, and those above it that do not exist, for this user alone, whatever the umask is. Raises
    OSError."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # raises where it is a file


@contextmanager
def locked(path: Path) -> Iterator[str]:
    """Hold the lock of a cache file, a file beside it, among the processes of this machine: those that start together
    make its content once. Where files cannot be locked it does not wait; gives the problem, or an empty text."""
    try:
        make_private(path.parent)
        lock = os.fdopen(os.open(path.with_suffix(".lock"), _LOCK_FLAGS, 0o600), "w")
    except OSError as error:
        yield error.strerror or str(error)
        return
    with lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield ""


def scratch_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder below this one; as a context manager it is removed at the end."""
    _remove_abandoned(parent)
    return tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX)


def sealed(content: bytes) -> bytes:
    """The content with its checksum at the end, for a file of which a part may be lost all the same."""
    return content + _DIGEST(content).digest()


def is_sealed(content: bytes) -> bool:
    """Whether this is what `sealed` returned, unchanged."""
    size = _DIGEST().digest_size
    return len(content) >= size and _DIGEST(content[:-size]).digest() == content[-size:]


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    for file in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process removes it, too
            if time.time() - file.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(file) if file.is_dir() else file.unlink()
