"""A description of the machine that a benchmark ran on, for its record."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from skipjoin.machine import cpu_name


def describe_machine() -> dict[str, object]:
    """CPU, cores, memory, load, versions; no names or paths."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": os.getloadavg()[0],
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("skipjoin", "torch", "transformers")},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
