"""Compiles the package's C++ sources once per machine and keeps the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from skipjoin.durable import is_sealed, scratch_folder, sealed, write_durably
from skipjoin.folders import cache_folder

_log = logging.getLogger(__name__)

_SOURCES = ("layer_ops.cpp", "paged_attention.cpp", "block_copy.cpp", "block_quant.cpp", "pool.cpp")
_FLAGS = ("-O3", "-march=native", "-pthread", "-std=c++17", "-shared", "-fPIC")
# A compiler that takes longer hangs.
_TIMEOUT_S = 300


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled operations, or None if they cannot be built; the reason is logged once as a warning.

    torch must be imported first: the library then shares torch's OpenMP threads.
    """
    try:
        return ctypes.CDLL(str(compiled_library()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        lines = [line for line in detail.splitlines() if "error" in line] or detail.splitlines() or [""]
        _log.warning("no compiled CPU operations; the slower torch operations are used instead: %s", lines[0])
        return None


def compiled_library() -> Path:
    """The library file, built if it does not exist or is not what was built: loading one that was cut off ends the
    process. Raises `OSError` or `SubprocessError` if it cannot be built."""
    folder = Path(__file__).parent
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler found (g++, c++ or clang++, or set CXX)")
    digest = hashlib.sha256(" ".join((compiler, *_FLAGS, _cpu(), "sealed")).encode())
    for source in sorted(folder.glob("*.cpp")):
        digest.update(source.read_bytes())
    cache = cache_folder()
    library = cache / f"ops-{digest.hexdigest()[:16]}.so"
    if library.is_file():
        if is_sealed(library.read_bytes()):
            return library
        _log.warning("%s is damaged, and is built again", library)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with scratch_folder(cache) as scratch:
        made = Path(scratch) / library.name
        command = [*shlex.split(compiler), *_FLAGS, *(str(folder / source) for source in _SOURCES), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        # Atomically: another process may be building the same file. Loaders ignore what follows the library.
        write_durably(library, sealed(made.read_bytes()))
    return library


def _cpu() -> str:
    """The inputs of -march=native: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
