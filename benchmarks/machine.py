"""The machine that a benchmark runs on, as its record describes it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

from skipjoin.system.machine import cpu_name

# Names in /proc/cpuinfo: those of x86, then those of ARM.
_INSTRUCTIONS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimddp", "fphp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
# Variables that make compilers and libraries use fewer instructions than the processor has.
_LIMITS = ("CXX", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


def describe_machine() -> dict[str, object]:
    """Return CPU, cores, instructions and their limits, memory, load and versions; no host names and no paths."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "instructions": instructions(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": os.getloadavg()[0],
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "limits": {name: re.sub(r"\S*/", "", os.environ[name]) for name in _LIMITS if name in os.environ},
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in ("skipjoin", "torch", "transformers")},
    }


def instructions() -> list[str] | None:
    """Return the instruction sets that matter for models, or None where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [name for name in _INSTRUCTIONS if name in flags]


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
