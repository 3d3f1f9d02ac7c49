"""Sources, flags and processor variants of compiled operations. Building a wheel reads only this file."""

from __future__ import annotations

from typing import NamedTuple

SOURCES = (
    "layer_ops.cpp", "grouped.cpp", "unpack.cpp", "paged_attention.cpp", "layers.cpp", "experts.cpp", "recurrent.cpp",
    "block_copy.cpp", "block_quant.cpp", "token_mask.cpp", "pool.cpp",
)  # fmt: skip
FLAGS = (
    "-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w",
    # Sums and products are fused only where the sources say so: functions that compute the same must return the same
    # bits.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing",
)  # fmt: skip


class Variant(NamedTuple):
    """Library of a wheel, for the processor `cpu` in LLVM's names, with required features as in /proc/cpuinfo."""

    path: str
    cpu: str
    needs: frozenset[str]

    @property
    def file(self) -> str:
        return f"ops-{self.path}.so"


# LLVM's levels of x86-64 and the features that they consist of.
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "popcnt", "sse4_2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
# Fastest first, by machine name.
VARIANTS = {
    "x86_64": (
        Variant("amx", "x86_64_v4+avx512bf16+avx512vnni+amx_tile+amx_bf16+amx_int8", _AMX),
        Variant("avx512-bf16", "x86_64_v4+avx512bf16+avx512vnni", _BF16),
        Variant("avx512", "x86_64_v4", _V4),
        Variant("avx2", "x86_64_v3", _V3),
        Variant("generic", "x86_64", frozenset()),
    ),
    "aarch64": (Variant("neon", "generic", frozenset({"asimd"})),),
}
