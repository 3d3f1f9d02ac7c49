from __future__ import annotations

import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full_error(error: OSError) -> bool:
    return error.errno in _FULL


def has_space(folder: Path, n_bytes: int) -> bool:
    """Return whether a disk has this much space, and inodes, or True if that cannot be determined."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return True
    has_files = found.f_favail > 0 or found.f_files == 0  # some file systems do not count them
    return found.f_bavail * found.f_frsize >= n_bytes and has_files


def no_space(folder: Path) -> str:
    return f"disk full: no space is left in the folder {folder}; free some, or name another folder"


def why_not_written(error: OSError, path: Path) -> str:
    if isinstance(error, FileExistsError):  # of `mkdir`
        return f"{error.filename} is not a folder"
    return no_space(path.absolute().parent) if is_full_error(error) else error.strerror or str(error)
