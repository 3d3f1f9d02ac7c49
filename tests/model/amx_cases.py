"""Selection of AMX instructions or amx_emulator.cpp for tests, and compiler flags of instruction sets."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from withhold_tiles import ARCH_PRCTL, REQUEST_PERMISSION

from skipjoin.model.ops import build

# Only tests of products and attention use the libraries below, which need not be fast. They are compiled in a third
# of the time. The macro gives them cache entries of their own.
QUICK = ("-Og", "-DSKIPJOIN_FEW_SOURCES")
SOURCES = (
    "layer_ops.cpp",
    "grouped.cpp",
    "paged_attention.cpp",
    "layers.cpp",
    "experts.cpp",
    "recurrent.cpp",
    "pool.cpp",
)
EMULATOR = Path(__file__).with_name("amx_emulator.cpp")
# Compiler flags by instruction set, and the features in /proc/cpuinfo of a processor that runs the result.
AVX2 = (*build.AVX2, *QUICK)
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AVX512_NEEDS = build.AVX2_NEEDS | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
BF16 = (*AVX512, "-mavx512bf16", "-mavx512vnni")
BF16_NEEDS = AVX512_NEEDS | {"avx512_bf16", "avx512_vnni"}
TILES = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
TILES_NEEDS = {"amx_tile", "amx_bf16", "amx_int8"}
INSTRUCTIONS = (*BF16, *TILES)
# Plain arithmetic instead of the instructions.
PLAIN = (*BF16, "-DSKIPJOIN_PLAIN_TILES")
# Flags and required processor features by the path that a library must name. For AMX, plain arithmetic replaces the
# instructions with the same bits, as test_ops_amx.py shows.
TARGETS = {
    "amx": (PLAIN, BF16_NEEDS),
    "avx512-bf16": (BF16, BF16_NEEDS),
    "avx512": (AVX512, AVX512_NEEDS),
    "avx2": (AVX2, build.AVX2_NEEDS),
    "generic": (QUICK, set()),
}


def compiled(path: str) -> Path:
    """Return a library for a path of `TARGETS`, building it if it is missing.

    Where this processor's own library has the path, it is taken, because all other tests have it built.
    """
    flags, _ = TARGETS[path]
    if path == "avx512-bf16" and not build.cpu_features() >= TILES_NEEDS:
        flags = INSTRUCTIONS  # without tiles, code for AMX takes this path, and test_ops_amx.py needs it
    elif path != "amx" and (own := _own_library()) is not None and build.path_of(own) == path:
        return Path(own._name)
    return quick_library(flags)


@functools.cache
def _own_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(build.compiled_library()))
    except (OSError, subprocess.SubprocessError):  # the compiler does not know this processor
        return None


def quick_library(flags: tuple[str, ...]) -> Path:
    """Return the library of `SOURCES` for flags with `QUICK`, building it if it is missing."""
    with mock.patch.object(build, "SOURCES", SOURCES):
        return build.compiled_library(flags)


def emulated_library(folder: Path) -> ctypes.CDLL:
    """Return the library with AMX instructions, whose calls, `syscall` above all, resolve to the emulator first.

    A copy in `folder` is loaded, because this process may have loaded the library without the emulator.
    """
    library = shutil.copy(quick_library(INSTRUCTIONS), folder / "instructions.so")
    compiler, emulated = shutil.which("g++") or shutil.which("clang++"), folder / "emulated.so"
    if compiler is None:
        raise OSError("no compiler for the emulator")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", *TILES, "-Wl,--no-as-needed"]
    subprocess.run([compiler, *flags, EMULATOR, library, "-o", emulated], check=True, capture_output=True, timeout=280)
    return ctypes.CDLL(str(emulated), mode=os.RTLD_NOW | os.RTLD_DEEPBIND)


def has_tiles(features: frozenset[str] | set[str], permitted: Callable[[], bool]) -> bool:
    """Return whether tiles run on a processor with these features.

    Args:
        permitted: Asks the kernel for permission. The kernel grants it permanently, after which the emulator gets no
            instructions.
    """
    return features >= TILES_NEEDS and permitted()


@functools.cache
def has_tiles_here() -> bool:
    """Return whether tiles run on this processor, and ask for permission."""
    return has_tiles(build.cpu_features(), is_permitted)


def is_permitted() -> bool:
    tile_data = 18  # index among the components of the processor's state
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, tile_data) == 0
