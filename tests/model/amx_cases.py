"""Selection of AMX instructions or amx_emulator.cpp for tests, and compiler flags of instruction sets."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from withhold_tiles import ARCH_PRCTL, REQUEST_PERMISSION

from skipjoin.model.ops import build

EMULATOR = Path(__file__).with_name("amx_emulator.cpp")
# Compiler flags by instruction set, and the features in /proc/cpuinfo of a processor that runs the result.
AVX512 = (*build.AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AVX512_NEEDS = build.AVX2_NEEDS | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
BF16 = (*AVX512, "-mavx512bf16")
BF16_NEEDS = AVX512_NEEDS | {"avx512_bf16"}
TILES = ("-mamx-tile", "-mamx-bf16")
TILES_NEEDS = {"amx_tile", "amx_bf16"}
INSTRUCTIONS = (*BF16, *TILES)
# Library that contains the emulator; calls from the library, `syscall` above all, resolve to it first. The digest makes
# the file name depend on the emulator, because the cache names libraries by their flags.
EMULATED = (
    *INSTRUCTIONS, "-Wl,-Bsymbolic", f"-DEMULATOR={hashlib.sha256(EMULATOR.read_bytes()).hexdigest()[:16]}",
    str(EMULATOR),
)  # fmt: skip
# Plain arithmetic instead of the instructions.
PLAIN = (*BF16, "-DSKIPJOIN_PLAIN_TILES")


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
    """Return whether the kernel permits this process to use tiles."""
    tile_data = 18  # index among the components of the processor's state
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, tile_data) == 0
