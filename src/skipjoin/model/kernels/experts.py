"""Products of experts: rows are sorted by expert, and a program multiplies some of them by some of its weights.

Tiles depend on the weights only, so that a row's bits do not depend on the batch. The CPU reads nothing, so that CUDA
graphs can replay the products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from skipjoin.model.kernels.paged import INTERPRETED
from skipjoin.model.kernels.products import multiplied, tiles

# Rows per program: few, because a decode has few rows per expert. Not tuned on a GPU.
BLOCK_ROWS = 32
_BLOCK, _WARPS = 1024, 4


class Blocks(NamedTuple):
    """Slots [blocks * BLOCK_ROWS], sorted by expert, -1 for none, and the expert of each block, or their number."""

    slots: torch.Tensor
    experts: torch.Tensor

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int) -> Blocks:
        flat, device = chosen.view(-1), chosen.device
        most = len(flat) // BLOCK_ROWS + min(len(flat), experts)
        counts = torch.zeros(experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
        padded = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
        ends, order = padded.cumsum(0), flat.sort(stable=True).indices
        skipped = ends - padded - (counts.cumsum(0) - counts)
        places = torch.arange(len(flat), device=device) + skipped[flat[order]]
        slots = torch.full((most * BLOCK_ROWS,), -1, device=device).scatter_(0, places, order)
        begins = torch.arange(most, device=device) * BLOCK_ROWS
        return cls(slots, torch.searchsorted(ends, begins, right=True))


@triton.jit
def expert_product_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, slots: tl.tensor, experts: tl.tensor,
    x_stride: tl.tensor,
    EXPERTS: tl.constexpr, PER_ROW: tl.constexpr, OUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    expert = tl.load(experts + tl.program_id(0))
    if expert < EXPERTS:
        slot = tl.load(slots + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.arange(0, BLOCK_K)
        # Rows of no slot read the first one, and are not written.
        left = x + (tl.maximum(slot, 0) // PER_ROW)[:, None] * x_stride + place[None, :]
        right = weight + (expert * OUTS + tl.minimum(column, OUTS - 1))[None, :] * INPUTS + place[:, None]
        acc = multiplied(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), left, right, INPUTS, UPCAST, BLOCK_K)
        if BIAS:
            acc += tl.load(bias + expert * OUTS + column, mask=column < OUTS, other=0.0).to(tl.float32)[None, :]
        inside = (slot >= 0)[:, None] & (column < OUTS)[None, :]
        tl.store(out + slot[:, None] * OUTS + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


def expert_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, slots: int, per_row: int
) -> torch.Tensor:
    experts, outs, inputs = weight.shape
    out = torch.empty((slots, outs), dtype=x.dtype, device=x.device)
    sizes = tiles(outs, x.element_size()) | {"BLOCK_M": BLOCK_ROWS}
    grid = (len(blocks.experts), triton.cdiv(outs, sizes["BLOCK_N"]))
    expert_product_kernel[grid](
        x, weight, weight if bias is None else bias, out, blocks.slots, blocks.experts, x.stride(0),
        EXPERTS=experts, PER_ROW=per_row, OUTS=outs, INPUTS=inputs, BIAS=bias is not None, UPCAST=INTERPRETED, **sizes,
    )  # fmt: skip
    return out


@triton.jit
def weighted_sum_kernel(
    found: tl.tensor, shares: tl.tensor, out: tl.tensor, width: tl.tensor, PER_ROW: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(PER_ROW):
        part = tl.load(found + (row * PER_ROW + slot) * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(shares + row * PER_ROW + slot) * part
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def weighted_sum(found: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    (rows, per_row), width = shares.shape, found.shape[1]
    out = torch.empty((rows, width), dtype=found.dtype, device=found.device)
    weighted_sum_kernel[(rows, triton.cdiv(width, _BLOCK))](
        found, shares, out, width, PER_ROW=per_row, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return out
