"""Compile the kernels that copy and quantize KV blocks without a GPU, and print their PTX.

python compile_copies.py 90
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from skipjoin.model.kernels import block_copy, block_quant

COPY_TYPES = {
    **dict.fromkeys(("target", "source"), "*i32"),
    **dict.fromkeys(("target_ids", "source_ids"), "*i64"),
    **dict.fromkeys(("blocks", "words", "target_stride", "source_stride"), "i32"),
}
QUANT_TYPES = {
    "codes": "*u8",
    "scales": "*i16",
    "device": "*bf16",
    **dict.fromkeys(("target_ids", "source_ids"), "*i64"),
    **dict.fromkeys(("blocks", "last", "heads"), "i32"),
    "most": "fp32",
}


def ptx_of(
    capability: int,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, int],
    *,
    unaligned: set[str],
    options: dict[str, Any],
) -> str:
    """Return the PTX for arguments that are multiples of 16, except `unaligned` ones."""
    kinds = types | dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    aligned = [name for name in names if name in types and name not in unaligned]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, {name: kinds[name] for name in names}, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return str(triton.compile(source, target=target, options=options).asm["ptx"])


def main() -> None:
    capability = int(sys.argv[1])
    chunk = {"CHUNK": block_copy._CHUNK}
    kernel, options = block_copy._copy, {"num_warps": block_copy._WARPS}
    print(ptx_of(capability, kernel, COPY_TYPES, chunk, unaligned={"blocks"}, options=options))
    sizes, options = {"TOKENS": 16, "DIM": 128, "ROWS": 16, "WIDTH": 128}, block_quant._OPTIONS
    numbers = {"blocks", "last", "heads", "most"}
    for kernel in (block_quant._quantize, block_quant._dequantize):
        print(ptx_of(capability, kernel, QUANT_TYPES, sizes, unaligned=numbers, options=options))


if __name__ == "__main__":
    main()
