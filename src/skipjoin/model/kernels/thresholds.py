from __future__ import annotations

import torch
import triton
import triton.language as tl

# Bits of the largest magnitude, infinity's: nonpositive numbers are ordered by their bits, the likeliest first.
_INFINITY = tl.constexpr(0x7F800000)
# Values per iteration of a pass, eight in each thread. A thread adds its own in float32, at most 64 of a vocabulary of
# 256k. Only the threads' sums are added over the block, in float64.
BLOCK = 4096
# As many registers as a multiprocessor has for this many threads: the compiler's own choice spills.
OPTIONS = {"num_warps": 16, "maxnreg": 128}


@triton.jit
def _magnitudes(row: tl.tensor, start: tl.tensor, vocab: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    at = start + tl.arange(0, BLOCK)
    values = tl.load(row + at, mask=at < vocab, other=float("-inf"))
    return values, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _totals(
    row: tl.tensor, vocab: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the numbers (COUNT) or sums of values with a magnitude of at most each of the three, which are finite."""
    kind = tl.int32 if COUNT else tl.float32
    wide = tl.int32 if COUNT else tl.float64
    one = tl.zeros((BLOCK,), kind)
    two = tl.zeros((BLOCK,), kind)
    three = tl.zeros((BLOCK,), kind)
    for start in range(0, vocab, BLOCK):
        values, magnitude = _magnitudes(row, start, vocab, BLOCK)
        shares = tl.full((BLOCK,), 1, tl.int32) if COUNT else tl.exp(values)
        one += tl.where(magnitude <= first, shares, 0)
        two += tl.where(magnitude <= second, shares, 0)
        three += tl.where(magnitude <= third, shares, 0)
    return tl.sum(one.to(wide)), tl.sum(two.to(wide)), tl.sum(three.to(wide))


@triton.jit
def _least(
    row: tl.tensor, vocab: tl.tensor, limit: tl.tensor, enough: tl.tensor, COUNT: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    low = tl.zeros((), tl.int32)
    while low < limit:
        quarter = (limit - low) // 4
        middle = low + (limit - low) // 2
        first = low + quarter
        third = middle + quarter
        one, two, three = _totals(row, vocab, first, middle, third, COUNT, BLOCK)
        low = tl.where(one >= enough, low, tl.where(two >= enough, first, tl.where(three >= enough, middle, third)) + 1)
        limit = tl.where(one >= enough, first, tl.where(two >= enough, middle, tl.where(three >= enough, third, limit)))
    return limit


@triton.jit
def thresholds_kernel(
    scaled: tl.tensor, row_stride: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, out: tl.tensor, vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0).to(tl.int64)  # rows times vocabulary may pass 2**31
    row = scaled + index * row_stride
    k, p = tl.load(top_k + index), tl.load(top_p + index)
    limit = tl.full((), _INFINITY, tl.int32)
    if k < vocab:
        limit = _least(row, vocab, limit, k, True, BLOCK)
    if p < 1:
        # Of values equal to the last one that top_k keeps, only as many count as are needed for k.
        below = limit - 1
        sums = _totals(row, vocab, limit, below, below, False, BLOCK)
        wanted = sums[0]
        if k < vocab:
            count = _totals(row, vocab, below, below, below, True, BLOCK)[0]
            edge = -limit.to(tl.float32, bitcast=True)
            wanted = sums[1] + (k - count) * tl.exp(edge).to(tl.float64)
        limit = _least(row, vocab, limit, p * wanted, False, BLOCK)
    tl.store(out + index, -limit.to(tl.float32, bitcast=True))


def bisected_thresholds(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    rows, vocab = scaled.shape
    out = torch.empty((rows, 1), dtype=torch.float32, device=scaled.device)
    thresholds_kernel[(rows,)](scaled, scaled.stride(0), top_k, top_p, out, vocab, BLOCK=BLOCK, **OPTIONS)
    return out
