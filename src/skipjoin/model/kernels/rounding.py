from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
# Columns at a time: 16 in each thread. The second pass reads a row from a cache.
_BLOCK, _WARPS = 2048, 4
_LARGEST = tl.constexpr(torch.finfo(FP8).max)
_SMALLEST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def round_rows_kernel(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, width: tl.tensor, x_stride: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    held = x + row * x_stride
    largest = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        values = tl.load(held + column, mask=column < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), _LARGEST), _SMALLEST_SCALE)
    tl.store(scales + row, scale)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        values = tl.load(held + column, mask=column < width, other=0.0).to(tl.float32)
        values = tl.div_rn(values, tl.zeros((BLOCK,), tl.float32) + scale)
        values = tl.minimum(values, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        values = tl.maximum(values, -_LARGEST, propagate_nan=tl.PropagateNan.ALL)
        tl.store(codes + row * width + column, values.to(codes.dtype.element_ty), mask=column < width)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    codes = torch.empty((rows, width), dtype=FP8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    round_rows_kernel[(rows,)](x, codes, scales, width, x.stride(0), BLOCK=_BLOCK, num_warps=_WARPS)
    return codes, scales
