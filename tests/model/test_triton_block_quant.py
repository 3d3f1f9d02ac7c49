"""The kernels that quantize KV blocks are bit-identical to torch's operations and compile for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from quant_cases import DTYPES, check_bound, fill, pools, round_trip, same_rows, without_subnormals

pytest.importorskip("triton")

from skipjoin.model.kernels import block_quant
from skipjoin.model.kernels.block_quant import TritonQuantizer
from skipjoin.model.ops.block_quant import TorchQuantizer

HAS_GPU = torch.cuda.is_available()


# Tiles of more and fewer tokens than a block, and a block size that is not a power of two.
@pytest.mark.parametrize(("block_size", "dim", "last"), [(16, 64, 5), (7, 40, 7), (24, 16, 1), (96, 80, 67)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_bit_identical_to_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_size: int, dim: int, last: int
) -> None:
    monkeypatch.setattr(block_quant, "_TILE", 2048)
    found, numbers = [], []
    for by in (TorchQuantizer(), TritonQuantizer()):
        kv, host = pools(dtype, block_size, dim, layers=1, device="cuda" if HAS_GPU else "cpu")
        if HAS_GPU:
            host.tensor = host.tensor.pin_memory()
        fill(kv, block_size)
        kv.tensor.copy_(without_subnormals(kv.tensor))
        before, after = round_trip(by, kv, host, last)
        found.append(host)
        numbers.append(without_subnormals(after))
    assert same_rows(*found)
    if HAS_GPU or dtype != torch.bfloat16:
        check_bound(before, after, last)
        assert torch.equal(*numbers)
    else:  # the interpreter truncates where GPUs round
        torch.testing.assert_close(*numbers, rtol=2.0**-7, atol=0.0)


# Compilation needs a process of its own, because this one interprets kernels.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from skipjoin.model.kernels import block_quant

for kernel in (block_quant._quantize, block_quant._dequantize):
    kinds = {"codes": "*u8", "scales": "*i16", "device": "*bf16", "target_ids": "*i64", "source_ids": "*i64"}
    constants = {"TOKENS": 16, "DIM": 128, "ROWS": 16, "WIDTH": 128}
    kinds |= {"blocks": "i32", "last": "i32", "heads": "i32", "most": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds[name] for name in kernel.arg_names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": block_quant._WARPS})
    print(compiled.asm["ptx"])
"""


@pytest.mark.parametrize("capability", [90])
def test_kernels_use_16_byte_loads_and_stores(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(capability)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    # A thread loads and stores values and codes 16 bytes at a time.
    for kernel in run.stdout.split(".visible .entry ")[1:]:
        assert re.search(r"ld\.global\S*\.v4\.b32", kernel)
        assert re.search(r"st\.global\S*\.v4\.b32", kernel)
        assert not re.search(r"(ld|st)\.(local|global\S*\.b8)", kernel)
