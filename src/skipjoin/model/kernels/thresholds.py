"""Thresholds of top_k and top_p for a row of logits, found without a sort and without the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Bits of the largest magnitude, infinity's: numbers up to 0 are ordered by their bits, the likeliest first.
_INFINITY = tl.constexpr(0x7F800000)
_BLOCK = 4096


@triton.jit
def _kept(row, vocab, most, BLOCK: tl.constexpr):
    """The number of values of a row with a magnitude of at most `most`, and the sum of their exponentials."""
    count = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        kept = (values.to(tl.int32, bitcast=True) & 0x7FFFFFFF) <= most
        kept = kept & (at < vocab)
        count += tl.sum(kept.to(tl.int64))
        total += tl.sum(tl.where(kept, tl.exp(values), 0.0).to(tl.float64))
    return count, total


@triton.jit
def _thresholds(scaled, row_stride, top_k, top_p, out, vocab, BLOCK: tl.constexpr):
    """One row: the smallest magnitude that keeps enough values, by bisection over its 31 bits."""
    index = tl.program_id(0)
    row = scaled + index * row_stride
    k, p = tl.load(top_k + index), tl.load(top_p + index)
    largest = tl.full((), _INFINITY, tl.int32)
    limit = largest
    wanted = _kept(row, vocab, largest, BLOCK)[1]
    if k < vocab:
        low = tl.zeros((), tl.int32)
        while low < limit:
            middle = low + (limit - low) // 2
            if _kept(row, vocab, middle, BLOCK)[0] >= k:
                limit = middle
            else:
                low = middle + 1
        # Of values equal to the last one, only as many count as are needed for k.
        count, inside = _kept(row, vocab, limit - 1, BLOCK)
        edge = -limit.to(tl.float32, bitcast=True)
        wanted = inside + (k - count) * tl.exp(edge).to(tl.float64)
    if p < 1:
        low = tl.zeros((), tl.int32)
        while low < limit:
            middle = low + (limit - low) // 2
            if _kept(row, vocab, middle, BLOCK)[1] >= p * wanted:
                limit = middle
            else:
                low = middle + 1
    tl.store(out + index, -limit.to(tl.float32, bitcast=True))


def bisected_thresholds(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest value of each row that top_k, then top_p, keep: float32 [n, 1].

    scaled: float32 [n, vocab], no value above 0, the largest of each row 0. top_k: int64 [n], vocab for none. top_p:
    float64 [n], 1 for none.
    """
    rows, vocab = scaled.shape
    out = torch.empty((rows, 1), dtype=torch.float32, device=scaled.device)
    _thresholds[(rows,)](scaled, scaled.stride(0), top_k, top_p, out, vocab, BLOCK=_BLOCK, num_warps=16)
    return out
