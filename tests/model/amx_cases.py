"""How the instructions of AMX run on a processor without them: see amx_emulator.cpp."""

from __future__ import annotations

import hashlib
from pathlib import Path

EMULATOR = Path(__file__).with_name("amx_emulator.cpp")
# What the processor must have besides, and the flags of a compiler.
NEEDS = {"avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
INSTRUCTIONS = ("-march=native", "-mamx-tile", "-mamx-bf16")
# A library with the emulator in it: a library's name in the cache depends on its flags, hence the digest. What the
# library calls, `syscall` above all, it finds in itself first.
EMULATED = (
    *INSTRUCTIONS, "-Wl,-Bsymbolic", f"-DEMULATOR={hashlib.sha256(EMULATOR.read_bytes()).hexdigest()[:16]}",
    str(EMULATOR),
)  # fmt: skip
# Plain arithmetic in place of the instructions.
PLAIN = ("-march=native", "-DSKIPJOIN_PLAIN_TILES")
