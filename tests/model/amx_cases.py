"""Where tests run the instructions of AMX: in the processor, or in amx_emulator.cpp. And flags of instruction sets."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from withhold_tiles import ARCH_PRCTL, REQUEST_PERMISSION

from skipjoin.model.ops import build

EMULATOR = Path(__file__).with_name("amx_emulator.cpp")
# Flags of the compiler by instruction set, and what /proc/cpuinfo says of a processor that runs the result.
AVX512 = (*build.AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AVX512_NEEDS = build.AVX2_NEEDS | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
BF16 = (*AVX512, "-mavx512bf16")
BF16_NEEDS = AVX512_NEEDS | {"avx512_bf16"}
TILES = ("-mamx-tile", "-mamx-bf16")
TILES_NEEDS = {"amx_tile", "amx_bf16"}
INSTRUCTIONS = (*BF16, *TILES)
# A library with the emulator in it: a library's name in the cache depends on its flags, hence the digest. What the
# library calls, `syscall` above all, it finds in itself first.
EMULATED = (
    *INSTRUCTIONS, "-Wl,-Bsymbolic", f"-DEMULATOR={hashlib.sha256(EMULATOR.read_bytes()).hexdigest()[:16]}",
    str(EMULATOR),
)  # fmt: skip
# Plain arithmetic in place of the instructions.
PLAIN = (*BF16, "-DSKIPJOIN_PLAIN_TILES")


def has_tiles(features: frozenset[str] | set[str], permitted: Callable[[], bool]) -> bool:
    """Return whether tiles run in a processor with these features. permitted: asks the kernel, which grants a process
    permission for good, so that the emulator gets no instruction from then on."""
    return features >= TILES_NEEDS and permitted()


@functools.cache
def has_tiles_here() -> bool:
    """Return whether tiles run in this processor and process, which asks for permission."""
    return has_tiles(build.cpu_features(), is_permitted)


def is_permitted() -> bool:
    """Return whether the kernel lets this process use tiles."""
    tile_data = 18  # of the components of a processor's state
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, tile_data) == 0
