from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from skipjoin.model.kernels.block_copy import copy_blocks, copy_spans

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
