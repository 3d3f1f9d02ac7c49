"""Batch-invariant matrix products: one tile size and order of additions for all batches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from skipjoin.model.kernels.paged import INTERPRETED

# A weight with fewer rows gets narrower tiles, so that enough programs read it. The choice depends on the weight alone.
_WIDE = 8192


@triton.jit
def multiplied(
    acc: tl.tensor, left: tl.tensor, right: tl.tensor,
    INPUTS: tl.constexpr, UPCAST: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return `acc` plus products of inputs, given the places of the first BLOCK_K of them."""
    place = tl.arange(0, BLOCK_K)
    for start in range(0, INPUTS, BLOCK_K):
        if INPUTS % BLOCK_K == 0:
            a = tl.load(left + start)
            b = tl.load(right + start)
        else:
            a = tl.load(left + start, mask=(start + place < INPUTS)[None, :], other=0.0)
            b = tl.load(right + start, mask=(start + place < INPUTS)[:, None], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor, x_stride: tl.tensor,
    OUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_K)
    # The last rows are read again, and not written.
    left = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + place[None, :]
    right = weight + tl.minimum(column, OUTS - 1).to(tl.int64)[None, :] * INPUTS + place[:, None]
    acc = multiplied(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), left, right, INPUTS, UPCAST, BLOCK_K)
    if BIAS:
        acc += tl.load(bias + column, mask=column < OUTS, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < OUTS)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * OUTS + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


def tiles(outs: int, itemsize: int) -> dict[str, int]:
    if itemsize > 2:  # exact products without tensor cores
        return {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": 64, "BLOCK_N": 64 if outs >= _WIDE else 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows, (outs, inputs) = x.shape[0], weight.shape
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    sizes = tiles(outs, x.element_size())
    grid = (triton.cdiv(rows, sizes["BLOCK_M"]), triton.cdiv(outs, sizes["BLOCK_N"]))
    product_kernel[grid](
        x, weight, weight if bias is None else bias, out, rows, x.stride(0),
        OUTS=outs, INPUTS=inputs, BIAS=bias is not None, UPCAST=INTERPRETED, **sizes,
    )  # fmt: skip
    return out
