from __future__ import annotations

from typing import IO

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None


def lock_file(file: IO[str] | int, *, is_shared: bool = False, waits: bool = True) -> bool:
    """Lock an open file until it is closed; the kernel also releases it when the process ends.

    Return False if another process holds it, or without support for locks.

    Raises:
        OSError: The file system has no locks.
    """
    if not HAS_LOCKS:
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
