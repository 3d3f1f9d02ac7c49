from __future__ import annotations

import torch
import triton
import triton.language as tl

from skipjoin.kv_format import Int8Rows
from skipjoin.model.attention.base import HeadWeights
from skipjoin.model.kernels.paged import jit, padded

# Heads per program: enough for a thread to move 16 bytes at a time, and few enough to spread a small batch.
_HEADS = 8
_MAX_CODE, _MIN_SCALE = tl.constexpr(float(Int8Rows.MAX_CODE)), tl.constexpr(Int8Rows.MIN_SCALE)
# Adding and subtracting it rounds a float32 to an integer.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _scaled(
    numbers: tl.tensor, factor: tl.tensor, weight: tl.tensor, kept: tl.tensor, offset: tl.tensor, source: tl.tensor
) -> tl.tensor:
    """Multiply by factor and weights, and round to the type of `source`, as a kernel of its own would."""
    found = numbers * factor * (tl.load(weight, mask=kept, other=0.0).to(tl.float32) + offset)
    return found.to(source.dtype.element_ty).to(tl.float32)


@triton.jit
def _head(
    source: tl.tensor, own: tl.tensor, cos: tl.tensor, sin: tl.tensor, weight: tl.tensor, eps: tl.tensor,
    offset: tl.tensor,
    DIM: tl.constexpr, PAIRS: tl.constexpr, NORMED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    pairs = tl.arange(0, BLOCK_P)[None, :]
    rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)[None, :]
    seen, kept = own & (pairs < PAIRS), own & (rest < DIM)
    first = cos
    second = cos
    others = cos
    if PAIRS > 0:
        first = tl.load(source + pairs, mask=seen, other=0.0).to(tl.float32)
        second = tl.load(source + PAIRS + pairs, mask=seen, other=0.0).to(tl.float32)
    if DIM > 2 * PAIRS:
        others = tl.load(source + rest, mask=kept, other=0.0)
    if NORMED:
        if PAIRS > 0 and DIM > 2 * PAIRS:
            wide = others.to(tl.float32)
            squares = tl.sum(first * first + second * second, 1) + tl.sum(wide * wide, 1)
        elif PAIRS > 0:
            squares = tl.sum(first * first + second * second, 1)
        else:
            wide = others.to(tl.float32)
            squares = tl.sum(wide * wide, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        if PAIRS > 0:
            first = _scaled(first, factor, weight + pairs, pairs < PAIRS, offset, source)
            second = _scaled(second, factor, weight + PAIRS + pairs, pairs < PAIRS, offset, source)
        if DIM > 2 * PAIRS:
            others = _scaled(wide, factor, weight + rest, rest < DIM, offset, source).to(source.dtype.element_ty)
    if PAIRS > 0:
        turned = (first * cos - second * sin).to(source.dtype.element_ty)
        second = (second * cos + first * sin).to(source.dtype.element_ty)
        first = turned
    return first, second, others


@triton.jit
def _top(numbers: tl.tensor) -> tl.tensor:
    """Return the bits of each row's largest magnitude, which are ordered like magnitudes, NaN last."""
    return tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _scale(top: tl.tensor) -> tl.tensor:
    largest = top.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.zeros_like(largest) + _MAX_CODE)
    return tl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)


@triton.jit
def _codes(numbers: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return (tl.div_rn(numbers, scale[:, None] + tl.zeros_like(numbers)) + _ROUND - _ROUND).to(tl.int8)


@jit
def _kv_write(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor,
    value_scales: tl.tensor, slots: tl.tensor, positions: tl.tensor, cos_sin: tl.tensor, query_weight: tl.tensor,
    key_weight: tl.tensor, eps: tl.tensor, offset: tl.tensor, query_token: tl.tensor, query_head: tl.tensor,
    key_token: tl.tensor, key_head: tl.tensor, value_token: tl.tensor, value_head: tl.tensor, block_stride: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_REST: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    kv_tiles: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    heads = tl.arange(0, TILE)
    pairs = tl.arange(0, BLOCK_P)
    rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)[None, :]
    cos = tl.zeros((1, BLOCK_P), tl.float32)
    sin = cos
    if PAIRS > 0:
        angles = cos_sin + tl.load(positions + token) * (2 * PAIRS) + pairs
        cos = tl.load(angles, mask=pairs < PAIRS, other=0.0)[None, :]
        sin = tl.load(angles + PAIRS, mask=pairs < PAIRS, other=0.0)[None, :]
    if tile < kv_tiles:
        head = (tile * TILE + heads)[:, None]
        slot = tl.load(slots + token)
        own = head < tl.where(slot >= 0, KV_HEADS, 0)
        to = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * SLOT_STRIDE + head * HEAD_STRIDE
        columns = tl.arange(0, BLOCK_D)[None, :]
        whole = own & (columns < DIM)
        moved = tl.load(value + token * value_token + head * value_head + columns, mask=whole, other=0.0)
        first, second, others = _head(
            key + token * key_token + head * key_head, own, cos, sin, key_weight, eps, offset,
            DIM, PAIRS, NORMED, BLOCK_P, BLOCK_REST,
        )  # fmt: skip
        seen, kept = own & (pairs < PAIRS)[None, :], own & (rest < DIM)
        if SCALED:
            numbers = moved.to(tl.float32)
            value_scale = _scale(_top(numbers))
            moved = _codes(numbers, value_scale)
            top = tl.zeros((TILE,), tl.int32)
            if PAIRS > 0:
                top = tl.maximum(_top(first.to(tl.float32)), _top(second.to(tl.float32)))
            if DIM > 2 * PAIRS:
                top = tl.maximum(top, _top(others.to(tl.float32)))
            key_scale = _scale(top)
            if PAIRS > 0:
                first = _codes(first.to(tl.float32), key_scale)
                second = _codes(second.to(tl.float32), key_scale)
            if DIM > 2 * PAIRS:
                others = _codes(others.to(tl.float32), key_scale)
            tl.store(value_scales + to // 4, value_scale[:, None], mask=own)
            tl.store(key_scales + to // 4, key_scale[:, None], mask=own)
        tl.store(values + to + columns, moved, mask=whole)
        if PAIRS > 0:
            tl.store(keys + to + pairs[None, :], first, mask=seen)
            tl.store(keys + to + PAIRS + pairs[None, :], second, mask=seen)
        if DIM > 2 * PAIRS:
            tl.store(keys + to + rest, others, mask=kept)
    elif PAIRS > 0 or NORMED:
        # Names of their own: a name must have one type in both branches.
        asking = ((tile - kv_tiles) * TILE + heads)[:, None]
        asked = asking < HEADS
        place = query + token * query_token + asking * query_head
        low, high, further = _head(
            place, asked, cos, sin, query_weight, eps, offset, DIM, PAIRS, NORMED, BLOCK_P, BLOCK_REST
        )
        if PAIRS > 0:
            turning = asked & (pairs < PAIRS)[None, :]
            tl.store(place + pairs[None, :], low, mask=turning)
            tl.store(place + PAIRS + pairs[None, :], high, mask=turning)
        if NORMED and DIM > 2 * PAIRS:
            tl.store(place + rest, further, mask=asked & (rest < DIM))


def kv_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    norms: HeadWeights | None = None,
) -> None:
    """Normalize queries and keys if there are `norms`, rotate them if `cos_sin` is given, and write the new KV.

    Args:
        query: Shape [T, heads, head_dim], head_dim innermost, changed in place; `key` and `value` likewise.
        keys: Shape [num_blocks, block_size, kv_heads, head_dim], with the same strides as `values`.
        scales: Of keys and values of an int8 cache, [num_blocks, block_size, kv_heads].
        slots: int64 [T]; -1 writes nothing.
    """
    tokens, heads, dim = query.shape
    kv_heads, block_size = keys.shape[2], keys.shape[1]
    turned = 0 if cos_sin is None else cos_sin.shape[1]
    tiles = triton.cdiv(kv_heads, _HEADS) + (triton.cdiv(heads, _HEADS) if turned or norms else 0)
    _kv_write[(tokens, tiles)](
        query, key, value, keys, values, *(scales or (keys, values)), slots, positions,
        query if cos_sin is None else cos_sin, *(norms or (query, query, 0.0, 0.0)),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAIRS=turned // 2, BLOCK_SIZE=block_size,
        SLOT_STRIDE=keys.stride(1), HEAD_STRIDE=keys.stride(2), TILE=_HEADS, BLOCK_D=padded(dim, 1),
        BLOCK_P=padded(turned // 2, 1), BLOCK_REST=padded(dim - turned, 1),
        SCALED=scales is not None, NORMED=norms is not None,
        num_warps=2,
    )  # fmt: skip
