"""Compile the kernels of norms, activations and thresholds without a GPU.

    python compile_ops.py 80-bf16 90-fp32 90-thresholds

Prints a line per kernel: its name, the bytes on the stack, and the number of global loads and stores that move less
than 16 bytes per thread. See `print_thresholds` for the kernel of top_k and top_p.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from compile_kernels import dumped, loops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from skipjoin.model.kernels.activations import bias_and_activation_kernel, gate_and_mul_kernel
from skipjoin.model.kernels.norms import norm_kernel, warps_of
from skipjoin.model.kernels.rounding import round_rows_kernel
from skipjoin.model.kernels.thresholds import BLOCK, OPTIONS, thresholds_kernel
from skipjoin.model.ops.base import CLAMPED_LIMIT, CLAMPED_SLOPE
from skipjoin.model.ops.torch_ops import ACTIVATIONS

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(kernel, types: dict[str, str], constants: dict, *, warps: int, capability: int) -> bytes:
    """Return machine code for arguments aligned to 16 where possible, which a launch detects itself."""
    aligned = [name for name, kind in types.items() if kind.startswith("*") or name.endswith(("stride", "width"))]
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps}).asm["cubin"]


def print_moves(label: str, code: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(code)
        dumps = [
            subprocess.run([TOOL, option, file], check=True, capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        ]
    stack = int(re.search(r"STACK:(\d+)", dumps[0])[1])
    moves = re.findall(r"\b(?:LDG|STG)\.[\w.]+", dumps[1])
    assert moves, "no load or store was found"
    print(f"{label}: {stack} {sum('.128' not in move for move in moves)}")


def print_thresholds(capability: int) -> None:
    """Print bytes on the stack, exchanges between threads in loops over a row, and whether row offsets have 64 bits."""
    types = {"scaled": "*fp32", "row_stride": "i32", "top_k": "*i64", "top_p": "*fp64", "out": "*fp32", "vocab": "i32"}
    source = ASTSource(
        fn=thresholds_kernel,
        signature=types | {"BLOCK": "constexpr"},
        constexprs={"BLOCK": BLOCK},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(types))},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=OPTIONS)
    usage, sass = dumped(kernel)
    over_row = [body for body in loops(sass) if sum(" BRA " in f" {text} " for text in body) == 1]
    assert all("LDG" in str(body) for body in over_row), "an innermost loop does not run over a row"
    exchanges = sum(bool(re.search(r"\b(BAR|SHFL|LDS|STS)", text)) for body in over_row for text in body)
    stack = re.search(r"STACK:(\d+)", usage)[1]
    wide = bool(re.search(r"arith.muli %index\S*, %row\S* : i64", kernel.asm["ttir"]))
    print(f"{capability} thresholds in {len(over_row)} loops: {stack} {exchanges} {wide}")


def main() -> None:
    for case in sys.argv[1:]:
        capability, value = case.split("-")
        if value == "thresholds":
            print_thresholds(int(capability))
            continue
        compile_all(case, int(capability), "*" + value)


def compile_all(case: str, capability: int, pointer: str) -> None:
    tensors = dict.fromkeys(("x", "product", "weight", "bias", "out"), pointer)
    types = tensors | {"rows": "i32", "x_stride": "i32", "head_stride": "i32", "eps": "fp32", "offset": "fp32"}
    for label, width, heads, centre, add in (
        ("rms norm of a sum", 4096, 1, False, True),
        ("layer norm of a sum", 5120, 1, True, True),
        ("rms norm of the widest", 16384, 1, False, True),
        ("rms norm of heads", 128, 32, False, False),
    ):
        block = triton.next_power_of_2(width)
        rows = 2048 // block if heads > 1 else 1
        constants = {"HEADS": heads, "WIDTH": width, "CENTRE": centre, "ADD": add, "WEIGHT": True, "BIAS": centre}
        constants |= {"OFFSET": False, "ROWS": rows, "BLOCK": block}
        code = compiled(norm_kernel, types, constants, warps=warps_of(block * rows), capability=capability)
        print_moves(f"{case} {label}", code)
    types = {"x": pointer, "out": pointer, "width": "i32", "x_stride": "i32"}
    constants = {"GATE": "silu", "LIMIT": CLAMPED_LIMIT, "SLOPE": CLAMPED_SLOPE, "BLOCK": 1024}
    print_moves(f"{case} silu and mul", compiled(gate_and_mul_kernel, types, constants, warps=4, capability=capability))
    if capability >= 89:  # cards that multiply the codes
        types = {"x": pointer, "codes": "*fp8e4nv", "scales": "*fp32", "width": "i32", "x_stride": "i32"}
        code = compiled(round_rows_kernel, types, {"BLOCK": 2048}, warps=4, capability=capability)
        print_moves(f"{case} rounding, a scale per row", code)
    types = {"x": pointer, "bias": pointer, "width": "i32", "x_stride": "i32"}
    for name in ACTIVATIONS:
        constants = {"BIAS": True, "ACTIVATION": name, "BLOCK": 1024}
        code = compiled(bias_and_activation_kernel, types, constants, warps=4, capability=capability)
        print_moves(f"{case} bias and {name}", code)


if __name__ == "__main__":
    main()
