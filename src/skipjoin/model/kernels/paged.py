from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import triton
import triton.language as tl

from skipjoin.model.attention.base import Softmax

# Whether kernels run in Triton's interpreter, whose tl.dot of bfloat16 is wrong, so operands are cast to float32 there.
INTERPRETED = bool(triton.knobs.runtime.interpret)

_LOG2E = 1.4426950408889634
LOG2E = tl.constexpr(_LOG2E)

R = TypeVar("R")


def padded(size: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(size))


def score_factors(softmax: Softmax) -> tuple[float, float]:
    """Return (factor, inner): scores to base 2 are factor * product, or factor * bounded(inner * product)."""
    if not softmax.cap:
        return softmax.scale * _LOG2E, 0.0
    return softmax.cap * _LOG2E, 2 * softmax.scale / softmax.cap


@triton.jit
def bounded(doubled: tl.tensor) -> tl.tensor:
    return 1.0 - 2.0 / (1.0 + tl.exp(doubled))


# Index tensors are views of one buffer, and block tables have any width. Specialized on their alignment, kernels would
# be compiled for each combination while requests wait.
INDEX_TENSORS = ("tables", "context_lens", "backward", "segments", "query_start", "tiles", "slots", "positions")
VARYING = ("window", "table_width", "count")


def jit(kernel: Callable[..., R]) -> triton.JITFunction[R]:
    names = inspect.signature(kernel).parameters
    return triton.jit(
        kernel,
        do_not_specialize=[n for n in names if n in VARYING],
        do_not_specialize_on_alignment=[n for n in names if n in INDEX_TENSORS],
    )


@triton.jit
def token_blocks(table: tl.tensor, index: tl.tensor, last: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    return tl.load(table + tl.minimum(index, last) // BLOCK_SIZE).to(tl.int32)


@triton.jit
def token_rows(
    blocks: tl.tensor, index: tl.tensor, last: tl.tensor, block_stride: tl.tensor, slot_step: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return element offsets of tokens in a layer's cache, with `slot_step` elements between consecutive slots.

    Tokens after `last` get its row, whose values are finite, so that loads need no mask.
    """
    slot = tl.minimum(index, last) % BLOCK_SIZE
    return blocks.to(tl.int64) * block_stride + slot * slot_step


@triton.jit
def load_scales(scales: tl.tensor, rows: tl.tensor) -> tl.tensor:
    return tl.load(scales + rows // 4)


@triton.jit
def load_rows(
    base: tl.tensor, rows: tl.tensor, columns: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    pointers = base + rows[:, None] + columns[None, :]
    if BLOCK_D > DIM:
        return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    return tl.load(pointers)
