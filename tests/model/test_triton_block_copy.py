"""Copies of many small blocks in one launch, against plain indexing, and code generation for absent GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

from skipjoin.model.kernels import block_copy  # noqa: E402
from skipjoin.model.kernels.block_copy import copy_blocks, copy_spans  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def random_bytes(blocks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return arbitrary bit patterns, NaN included, which copies must preserve."""
    size = (blocks, elements * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("elements", [16, 1000, 4096, 10_001, 3 * 4096])
def test_rows_are_copied_without_changing_others(dtype: torch.dtype, elements: int) -> None:
    source, target = random_bytes(9, elements, dtype), random_bytes(7, elements, dtype)
    to, rows = torch.tensor([6, 0, 3, 4]), torch.tensor([2, 8, 7, 0])
    expected = target.clone()
    expected[to] = source[rows]
    moved = target.to(DEVICE)
    copy_blocks(moved, source.to(DEVICE), to.to(DEVICE), rows.to(DEVICE))
    assert torch.equal(moved.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_strided_rows_and_more_blocks_than_programs() -> None:
    """The rows of both sides are strided."""
    wide = random_bytes(64, 300, torch.float32)
    source, target = wide[:, 40:100], torch.zeros(64, 80)[:, :60]
    order = torch.randperm(64)
    copy_blocks(moved := target.to(DEVICE), source.to(DEVICE), order.to(DEVICE), torch.arange(64).to(DEVICE))
    assert torch.equal(moved.cpu().view(torch.int32)[order], source.contiguous().view(torch.int32))


def test_empty_copies_and_mismatched_rows() -> None:
    pool, none = torch.zeros(2, 4), torch.empty(0, dtype=torch.int64)
    copy_blocks(pool, pool, none, none)
    with pytest.raises(ValueError, match=r"rows of torch.float32 4 do not fit torch.float32 8"):
        copy_blocks(torch.zeros(2, 8), pool, none, none)
    with pytest.raises(ValueError, match=r"rows of torch.float32 4 do not fit torch.bfloat16 4"):
        copy_blocks(torch.zeros(2, 4, dtype=torch.bfloat16), pool, none, none)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 20), (torch.bfloat16, 64), (torch.bfloat16, 7)])
def test_slots_are_copied_for_all_heads(dtype: torch.dtype, dim: int) -> None:
    size, heads = 16, 3
    source, target = (
        random_bytes(blocks, heads * size * dim, dtype).view(blocks, heads, size, dim) for blocks in (9, 7)
    )
    to, rows, spans = (6, 0, 3), (2, 8, 7), ((0, 16), (15, 1), (3, 9))
    expected = target.clone()
    for block, other, (first, count) in zip(to, rows, spans, strict=True):
        expected[block, :, first : first + count] = source[other, :, first : first + count]
    moved, parts = target.to(DEVICE), torch.tensor((to, rows, *zip(*spans, strict=True))).to(DEVICE)
    copy_spans(moved, source.to(DEVICE), parts)
    assert torch.equal(moved.cpu().flatten().view(torch.uint8), expected.flatten().view(torch.uint8))
    with pytest.raises(ValueError, match="do not fit"):
        copy_spans(moved, source[..., :1], parts)


# Compilation needs a process of its own, because this one interprets kernels.
COMPILE = """
import re, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from skipjoin.model.kernels import block_copy

kernel = block_copy._copy
pointer = sys.argv[2]
types = dict.fromkeys(("target", "source"), pointer) | dict.fromkeys(("target_ids", "source_ids"), "*i64")
signature = types | dict.fromkeys(("blocks", "words", "target_stride", "source_stride"), "i32") | {"CHUNK": "constexpr"}
aligned = [name for name in signature if name not in ("blocks", "CHUNK")]
attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
source = ASTSource(kernel, signature, {"CHUNK": block_copy._CHUNK}, attributes)
target = GPUTarget("cuda", int(sys.argv[1]), 32)
compiled = triton.compile(source, target=target, options={"num_warps": block_copy._WARPS})
print(compiled.asm["ptx"])
"""


@pytest.mark.parametrize("capability", [90])
def test_kernel_uses_16_byte_loads_and_stores(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(capability), "*i32"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    loads = re.findall(r"ld\.global\S*\.v4\.b32", run.stdout)
    stores = re.findall(r"st\.global\S*\.v4\.b32", run.stdout)
    # A thread moves its part of a chunk 4 words at a time; the only other loads are the two ids.
    wanted = block_copy._CHUNK // (32 * block_copy._WARPS) // 4
    assert (len(loads), len(stores)) == (wanted, wanted)
    assert len(re.findall(r"ld\.global", run.stdout)) == wanted + 2
    assert "ld.local" not in run.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("outward", [False, True])
def test_page_locked_memory_is_read_and_written_in_place(outward: bool) -> None:
    host = random_bytes(512, 8192, torch.float32).pin_memory()
    device = random_bytes(512, 8192, torch.float32).cuda()
    target, source = (host, device) if outward else (device, host)
    before = source.cpu().view(torch.int32)
    to, rows = torch.randperm(512)[:300], torch.randperm(512)[:300]
    expected = target.cpu().view(torch.int32).clone()
    expected[to] = before[rows]
    copy_blocks(target, source, to.cuda(), rows.cuda())
    torch.cuda.synchronize()
    assert torch.equal(target.cpu().view(torch.int32), expected)
