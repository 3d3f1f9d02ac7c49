from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from skipjoin.model.attention.base import Softmax
from skipjoin.model.batch import PackedBatch
from skipjoin.model.kernels.paged import (
    INTERPRETED,
    LOG2E,
    bounded,
    jit,
    load_rows,
    load_scales,
    padded,
    score_factors,
    token_blocks,
    token_rows,
)

_LOWEST = tl.constexpr(-1.0e30)
# Segments of at most this many queries times heads of a group fill no larger tile.
SHORT_ROWS = 64


@triton.jit
def _tiles(
    acc: tl.tensor, total: tl.tensor, top: tl.tensor, q: tl.tensor, own: tl.tensor, low: tl.tensor, high: tl.tensor,
    context: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor,
    table: tl.tensor, block_stride: tl.tensor, step: tl.tensor, scale: tl.tensor, inner: tl.tensor, window: tl.tensor,
    MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, UPCAST: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    tokens = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    last = tl.maximum(context - 1, 0)
    blocks = token_blocks(table, low + tokens, last, BLOCK_SIZE)
    for start in range(low, high, BLOCK_N):
        position = start + tokens
        rows = token_rows(blocks, position, last, block_stride, step, BLOCK_SIZE)
        k = load_rows(keys, rows, columns, DIM, BLOCK_D)
        v = load_rows(values, rows, columns, DIM, BLOCK_D)
        # Prefetch the next tile's blocks: keys and values wait for their own loads only.
        blocks = token_blocks(table, position + BLOCK_N, last, BLOCK_SIZE)
        k = k.to(q.dtype) if UPCAST or SCALED else k
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SCALED:
            scores *= load_scales(key_scales, rows)[None, :]
        if CAPPED:
            scores = bounded(scores * inner)
        if MASKED:
            visible = (position[None, :] <= own[:, None]) & (position[None, :] > own[:, None] - window)
            scores = tl.where(visible, scores * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
        else:
            higher = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if SCALED:
            weights *= load_scales(value_scales, rows)[None, :]
        v = v.to(q.dtype) if UPCAST or SCALED else v
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = higher
    return acc, total, top


@jit
def _prefill(
    out: tl.tensor, query: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor,
    value_scales: tl.tensor, tables: tl.tensor, context_lens: tl.tensor, backward: tl.tensor, query_start: tl.tensor,
    tiles: tl.tensor, sinks: tl.tensor, scale: tl.tensor, inner: tl.tensor, window: tl.tensor, query_token: tl.tensor,
    query_head: tl.tensor, block_stride: tl.tensor, table_width: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr, SCALED: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Attend for a (key-value head, tile). Row r of the tile is token r // GROUP, head r % GROUP."""
    kv_head = tl.program_id(0)
    segment = tl.load(tiles + tl.program_id(1) * 2)
    first_token = tl.load(tiles + tl.program_id(1) * 2 + 1).to(tl.int32)
    begin = tl.load(query_start + segment)
    length = (tl.load(query_start + segment + 1) - begin).to(tl.int32)
    context = tl.load(context_lens + segment).to(tl.int32)
    down = tl.load(backward + segment)
    per_tile: tl.constexpr = BLOCK_M // GROUP
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    token = first_token + rows // GROUP
    own = context - length + token
    head = kv_head * GROUP + rows % GROUP
    asked = ((rows < per_tile * GROUP) & (token < length))[:, None] & (columns < DIM)[None, :]
    place = (begin + token) * query_token + head * query_head
    q = tl.load(query + place[:, None] + columns[None, :], mask=asked, other=0.0)
    q = q.to(tl.float32) if UPCAST else q
    base = tl.where(down > 0, (BLOCK_SIZE - 1) * SLOT_STRIDE, 0) + kv_head * HEAD_STRIDE
    step = tl.where(down > 0, -SLOT_STRIDE, SLOT_STRIDE)
    keys += base
    values += base
    if SCALED:
        key_scales += base // 4
        value_scales += base // 4
    table = tables + segment * table_width
    # Only tiles that hold keys visible to some of the tokens are read, and only those in which some token does not see
    # some key are masked: the last ones, and with a window the first ones.
    first = context - length + first_token
    high = tl.minimum(first + per_tile, context)
    low = tl.where(window > 0, tl.maximum(first + 1 - window, 0), 0) // BLOCK_N * BLOCK_N if WINDOWED else 0
    top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        top = tl.load(sinks + head) * LOG2E
        total += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    seen_by_all = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, low)
    if WINDOWED:
        entered = tl.minimum(tl.cdiv(tl.maximum(high - window, 0), BLOCK_N) * BLOCK_N, seen_by_all)
        acc, total, top = _tiles(
            acc, total, top, q, own, low, entered, context, keys, values, key_scales, value_scales, table,
            block_stride, step, scale, inner, window, True, DIM, BLOCK_SIZE, UPCAST, SCALED, CAPPED, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        low = entered
    acc, total, top = _tiles(
        acc, total, top, q, own, low, seen_by_all, context, keys, values, key_scales, value_scales, table,
        block_stride, step, scale, inner, window, False, DIM, BLOCK_SIZE, UPCAST, SCALED, CAPPED, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    acc, total, top = _tiles(
        acc, total, top, q, own, seen_by_all, high, context, keys, values, key_scales, value_scales, table,
        block_stride, step, scale, inner, window, True, DIM, BLOCK_SIZE, UPCAST, SCALED, CAPPED, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = ((begin + token) * (tl.num_programs(0) * GROUP) + head) * DIM
    tl.store(out + place[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=asked)


def prefill_configs(group: int, dim: int, itemsize: int, rows: int, *, wgmma: bool = True) -> list[dict[str, int]]:
    """Return candidate sizes, the default first; `rows` are queries of the longest segment times heads of a group.

    With `wgmma` (compute capability 9.0), products read operands from shared memory. Otherwise operands are in
    registers, and the same tiles would spill.
    """
    if itemsize > 2:  # exact products without tensor cores
        sizes = [(32, 32, 4, 2)] if dim <= 64 else [(16, 16, 4, 2)]
    elif dim > 128:
        # The first must fit GPUs with the least shared memory per multiprocessor: 99 KiB.
        sizes = [(64, 32, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2)] if wgmma else [(64, 32, 8, 2)]
    elif not wgmma and dim > 64:
        sizes = [(64, 32, 4, 4), (64, 64, 8, 3)]
        if rows > SHORT_ROWS:
            sizes.insert(0, (128, 32, 8, 4))
    elif rows <= SHORT_ROWS:
        sizes = [(64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 4)]
    else:
        sizes = [(128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)]
    # A tile has at least one token with its whole group.
    return [{"BLOCK_M": padded(group, m), "BLOCK_N": n, "num_warps": w, "num_stages": s} for m, n, w, s in sizes]


def query_tiles(batch: PackedBatch, segments: Sequence[int], per_tile: int) -> np.ndarray:
    parts = [np.arange(0, batch.lengths[i], per_tile) for i in segments]
    owners = np.repeat(np.asarray(segments, np.int64), [len(p) for p in parts])
    first = np.concatenate(parts)
    keys = np.asarray(batch.starts, np.int64)[owners] + first
    order = np.lexsort((owners, -keys))
    return np.stack([owners, first], axis=1)[order]


def prefill_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    batch: PackedBatch,
    tiles: torch.Tensor,
    *,
    softmax: Softmax,
    window: int,
    config: Mapping[str, int],
) -> None:
    """Attend for the tokens of `tiles`, made by `query_tiles` with config["BLOCK_M"] // (heads per KV head)."""
    heads, dim = query.shape[1:]
    kv_heads, block_size = keys.shape[2], keys.shape[1]
    _prefill[(kv_heads, tiles.shape[0])](
        out, query, keys, values, *(scales or (keys, values)), batch.block_tables, batch.context_lens,
        batch.reversed, batch.query_start, tiles, query if softmax.sinks is None else softmax.sinks,
        *score_factors(softmax),
        window if window else 1 << 30, query.stride(0), query.stride(1), keys.stride(0), batch.block_tables.stride(0),
        GROUP=heads // kv_heads, DIM=dim, BLOCK_SIZE=block_size, SLOT_STRIDE=keys.stride(1),
        HEAD_STRIDE=keys.stride(2), WINDOWED=window > 0, UPCAST=INTERPRETED,
        SCALED=scales is not None, CAPPED=softmax.cap != 0, SINKS=softmax.sinks is not None, BLOCK_D=padded(dim),
        **config,
    )  # fmt: skip
