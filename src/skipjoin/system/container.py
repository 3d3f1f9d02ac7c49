"""Memory and CPU limits of this process's container, from cgroups v1 and v2 below `root`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class _Names(NamedTuple):
    limit: str
    usage: str
    cache: str
    kills: str


_VERSIONS = {
    "cgroup2": _Names("memory.max", "memory.current", "inactive_file", "memory.events"),
    "cgroup": _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
}


def free_memory(root: Path = ROOT) -> int | None:
    """Return the remaining bytes under the tightest cgroup limit, including reclaimable page cache."""
    folders = _folders(root, "memory")
    return min((left for folder, kind in folders if (left := _left(folder, _VERSIONS[kind])) is not None), default=None)


def oom_kills(root: Path = ROOT) -> int:
    for folder, kind in _folders(root, "memory"):
        with suppress(OSError, ValueError, KeyError):
            return _table(folder / _VERSIONS[kind].kills)["oom_kill"]
    with suppress(OSError, ValueError, KeyError):
        return _table(root / "proc/vmstat")["oom_kill"]
    return 0


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of threads that can run at once, by CPU affinity and cgroup quotas, rounded up."""
    affine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder, kind in _folders(root, "cpu") if (quota := _quota(folder, kind)) is not None]
    return max(1, min(affine, *(math.ceil(quota) for quota in quotas)) if quotas else affine)


def _quota(folder: Path, kind: str) -> float | None:
    try:
        if kind == "cgroup2":
            limit, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        return None if limit in ("max", "-1") else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _left(folder: Path, names: _Names) -> int | None:
    try:
        limit = (folder / names.limit).read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((folder / names.usage).read_text(encoding="ascii"))
        cache = _table(folder / "memory.stat").get(names.cache, 0)
        return max(0, int(limit) - max(0, used - cache))
    except (OSError, ValueError):
        return None


def _table(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2}


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    paths = _own_paths(root, controller)
    for kind, top, mount in _mounts(root, controller):
        own = paths.get(kind)
        if own is None:
            continue
        inside = own.removeprefix(top.rstrip("/")) if (own + "/").startswith(top.rstrip("/") + "/") else ""
        folder = root / mount.lstrip("/")
        below = [part for part in inside.split("/") if part and part != ".."]
        for depth in range(len(below), -1, -1):
            yield folder.joinpath(*below[:depth]), kind


def _own_paths(root: Path, controller: str) -> dict[str, str]:
    found = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found["cgroup2"] = path
        elif controller in controllers.split(","):
            found["cgroup"] = path
    return found


def _mounts(root: Path, controller: str) -> Iterator[tuple[str, str, str]]:
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.rsplit(" ", 1)[-1].split(",")):
            fields = place.split(" ")
            yield kind, fields[3], fields[4]


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line]
    except OSError:
        return []
