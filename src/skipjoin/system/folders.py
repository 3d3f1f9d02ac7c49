from __future__ import annotations

import functools
import logging
import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

try:
    import pwd
except ImportError:  # not on Windows
    pwd = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

# Maximum number of links in a path, as on Linux.
_MAX_LINKS = 40


def cache_folder() -> Path:
    """Return Skipjoin's folder in $XDG_CACHE_HOME or ~/.cache, or a private temporary folder."""
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
    folder = Path(tempfile.gettempdir()) / f"skipjoin-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if is_own else None


# -- trust --------------------------------------------------------------------------------------------------------


def is_trusted(path: Path, what: str) -> bool:
    """Return whether only this user and root can change a path. If not, warn once that `what` is ignored."""
    reason = why_untrusted(path)
    if reason is not None:
        _warn_once(f"{what} {path} is not used: {reason}")
    return reason is None


def why_untrusted(path: Path) -> str | None:
    """Return why another user may have created or changed `path`, with the remedy, or None.

    The rules are OpenSSH's for keys: no other user or group may write to the path or a folder above it, up to the home
    folder or the root. A folder above may be sticky. Links above the path are followed if they belong to this user or
    root; the path itself must not be a link.
    """
    if not hasattr(os, "getuid"):  # on Windows
        return None
    spelled = Path(os.path.abspath(path))  # `resolve` would hide links
    above_home = set(_home().parents)
    try:
        if spelled.is_symlink():
            return f"{spelled} is a symbolic link; remove it, or name the folder that it leads to"
        visited = [(folder, found) for folder, found in _visit(spelled) if folder not in above_home]
    except OSError as error:
        return f"{error.filename or spelled} cannot be examined: {error.strerror or error}"
    for number, (folder, found) in enumerate(visited, 1):
        if found.st_uid not in (0, os.getuid()):
            owner, us = _user(found.st_uid), _user(os.getuid())
            return f"{folder} belongs to user {owner}, not to {us} or root; remove it, or change its owner (chown)"
        is_above = number < len(visited) or folder != spelled
        is_sticky = is_above and found.st_mode & stat.S_ISVTX
        if found.st_mode & 0o022 and not is_sticky and not stat.S_ISLNK(found.st_mode):
            mode, quoted = stat.S_IMODE(found.st_mode), shlex.quote(str(folder))
            return f"{folder} has mode {mode:04o}, so other users may write to it; run: chmod go-w {quoted}"
    return None


def _visit(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    folder = Path(path.anchor)
    ahead = list(reversed(path.parts[1:]))
    links = 0
    yield folder, folder.lstat()
    while ahead:
        name = ahead.pop()
        folder = folder.parent if name == ".." else folder / name
        try:
            found = folder.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        yield folder, found
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise OSError(f"{path} leads through too many links")
            target = Path(os.readlink(folder))
            folder = Path(target.anchor) if target.is_absolute() else folder.parent
            ahead += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _home() -> Path:
    with suppress(RuntimeError):
        return Path.home()
    return Path("/")


def _user(number: int) -> str:
    with suppress(KeyError):
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    return str(number)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
