from __future__ import annotations

import torch
import triton
import triton.language as tl

# A whole row is held in registers: 16 values in each thread of the largest block.
MAX_WIDTH = 16384
# Values per thread, two loads of 16 bytes in half types: enough in flight to hide memory latency.
_PER_THREAD = 16
_MAX_WARPS = 32
# Short rows, mainly heads, share a program up to this many values.
_PER_PROGRAM = 2048


# The number of rows varies between steps, so one version serves all.
@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x: tl.tensor, product: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor,
    x_stride: tl.tensor, head_stride: tl.tensor, eps: tl.tensor, offset: tl.tensor,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, CENTRE: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    held = x + (row // HEADS) * x_stride + (row % HEADS) * head_stride + column
    packed = row * WIDTH + column
    values = tl.load(held, mask=inside, other=0.0).to(tl.float32)
    # Issue all loads before the first sum waits for any.
    if WEIGHT:
        factor = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    if BIAS:
        shift = tl.load(bias + column, mask=column < WIDTH, other=0.0)
    if ADD:
        values += tl.load(product + packed, mask=inside, other=0.0).to(tl.float32)
        total = values.to(x.dtype.element_ty)
        tl.store(held, total, mask=inside)
        # Normalize the values as they are stored, which the next sublayer reads.
        values = total.to(tl.float32)
    if CENTRE:
        mean = tl.sum(values, axis=1, keep_dims=True) / WIDTH
        values = tl.where(inside, values - mean, 0.0)
    square = tl.sum(values * values, axis=1, keep_dims=True) / WIDTH
    values *= tl.rsqrt(square + eps)
    if WEIGHT:
        factor = factor.to(tl.float32)
        if OFFSET:
            factor += offset
        values *= factor
    if BIAS:
        values += shift.to(tl.float32)
    tl.store(out + packed, values.to(out.dtype.element_ty), mask=inside)


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    centre: bool,
    offset: float = 0.0,
    product: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the norm over the last dimension, contiguous, with arithmetic in float32.

    Args:
        x: Shape [n, width], or [n, heads, width] contiguous in the last dimension.
        centre: Normalize by mean and variance instead of the root mean square.
        product: Contiguous; added to `x` in place first.
    """
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    rows, width = x.shape[0] * heads, x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    together = max(1, _PER_PROGRAM // block) if heads > 1 else 1
    norm_kernel[(triton.cdiv(rows, together),)](
        x, x if product is None else product, x if weight is None else weight, x if bias is None else bias, out,
        rows, x.stride(0), head_stride, eps, offset,
        HEADS=heads, WIDTH=width, CENTRE=centre, ADD=product is not None, WEIGHT=weight is not None,
        OFFSET=offset != 0, BIAS=bias is not None, ROWS=together, BLOCK=block, num_warps=warps_of(block * together),
    )  # fmt: skip
    return out


def warps_of(values: int) -> int:
    return min(max(values // (32 * _PER_THREAD), 1), _MAX_WARPS)
