"""Where the user's files are kept."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Skipjoin's folder in the user's cache folder: $XDG_CACHE_HOME, or ~/.cache. It need not exist.

    Where no home folder can be found, a temporary folder of this user's own, after a warning.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "skipjoin"
    try:
        return Path.home() / ".cache" / "skipjoin"
    except RuntimeError:
        return _temporary()


@functools.cache
def _temporary() -> Path:
    folder = _shared_by_processes() or Path(tempfile.mkdtemp(prefix="skipjoin-"))
    _log.warning("no home folder is found: caches, forecasts and batches are kept in %s; set XDG_CACHE_HOME", folder)
    return folder


def _shared_by_processes() -> Path | None:
    """A temporary folder that is the same in all processes of this user; None if its name is taken."""
    folder = Path(tempfile.gettempdir()) / f"skipjoin-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    # What is in it is run, as compiled operators are: no other user may write there.
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if is_own else None
