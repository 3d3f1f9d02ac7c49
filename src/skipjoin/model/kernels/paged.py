"""What the attention kernels share: where a token's row lies in the cache, and how rows are loaded."""

from __future__ import annotations

import triton
import triton.language as tl

# Whether kernels run in Triton's interpreter. Its tl.dot of bfloat16 is wrong, so operands are cast to float32 there.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def padded(size: int, least: int = 16) -> int:
    """The next power of two, at least `least`: what a tile's side or an operand of tl.dot must have."""
    return max(least, triton.next_power_of_2(size))


@triton.jit
def token_rows(table, index, seen, block_stride, slot_step, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Element offsets of tokens at logical places `index` of one sequence; if MASKED, only where `seen`.

    slot_step: elements from a slot to the next in the sequence's direction; the caller's base pointer is at the slot
    where a block begins in that direction.
    """
    if MASKED:
        block = tl.load(table + index // BLOCK_SIZE, mask=seen, other=0)
    else:
        block = tl.load(table + index // BLOCK_SIZE)
    return block * block_stride + (index % BLOCK_SIZE) * slot_step


@triton.jit
def load_rows(base, rows, seen, columns, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[len(rows), BLOCK_D] values; zeros beyond DIM and, if MASKED, where not `seen`."""
    pointers = base + rows[:, None] + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=seen[:, None] & (columns < DIM)[None, :], other=0.0)
    if BLOCK_D > DIM:
        return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    return tl.load(pointers)
