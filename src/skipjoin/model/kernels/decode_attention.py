"""Attention of one query token per sequence over the paged cache; a sequence's keys are split over programs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from skipjoin.model.batch import PackedBatch
from skipjoin.model.kernels.paged import INTERPRETED, jit, load_rows, padded, token_blocks, token_rows

# Below every score, and finite: the difference of two of them is zero, not NaN.
_LOWEST = tl.constexpr(-1.0e30)
_LOG2E = 1.4426950408889634
# A program with fewer keys costs more than the better balance saves.
LEAST_KEYS = 128
_LEAST_KEYS = tl.constexpr(LEAST_KEYS)
SPLITS = (1, 2, 4, 8, 16, 32, 64)
# For all batches, where results must not depend on the batch.
INVARIANT_SPLITS = 8


@triton.jit
def _span(context_lens, offsets, backward, segment, window, BLOCK_N: tl.constexpr):
    """(first position, end, offset, direction) of this program's share of its sequence's keys."""
    context = tl.load(context_lens + segment).to(tl.int32)
    offset = tl.load(offsets + segment).to(tl.int32)
    down = tl.load(backward + segment).to(tl.int32)
    low = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    share = tl.maximum(tl.cdiv(context - low, tl.num_programs(2)), _LEAST_KEYS)
    share = tl.cdiv(share, BLOCK_N) * BLOCK_N
    begin = low + tl.program_id(2) * share
    return begin, tl.minimum(begin + share, context), offset, down


@jit
def _decode(
    out,
    sums,
    stats,
    query,
    keys,
    values,
    tables,
    context_lens,
    offsets,
    backward,
    segments,
    query_start,
    scale,
    window,
    query_token,
    query_head,
    block_stride,
    table_width,
    INDEXED: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    UPCAST: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (key-value head, sequence, split): all query heads of the group over its share of the keys. Heads are the
    first grid axis: the keys of a block's heads are adjacent, so programs that start together read one run of memory.

    DOT: computes the group's scores with tensor cores; otherwise, for a group of one, by multiplying and adding: every
    row of the tile then has a softmax of its own, so that threads exchange data only at the end.

    STAGES: number of tiles of keys and values in flight, less one. With DOT it is an option of the launch: set on the
    loop it would hold for the block table too, whose loads of the next tile would then wait for those of this one.
    Without DOT only a loop that sets it is pipelined, and the table with it.
    """
    kv_head = tl.program_id(0)
    segment = tl.program_id(1).to(tl.int64)
    token = segment
    if INDEXED:
        segment = tl.load(segments + segment)
        token = tl.load(query_start + segment)
    begin, end, offset, down = _span(context_lens, offsets, backward, segment, window, BLOCK_N)
    table = tables + segment * table_width
    first = tl.where(down > 0, (BLOCK_SIZE - 1) * SLOT_STRIDE, 0) + kv_head * HEAD_STRIDE
    step = tl.where(down > 0, -SLOT_STRIDE, SLOT_STRIDE)
    keys += first
    values += first
    tokens = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    query += token * query_token + kv_head * GROUP * query_head
    if DOT:
        heads = tl.arange(0, BLOCK_H)
        there = heads < GROUP
        asked = there[:, None] & (columns < DIM)[None, :]
        q = tl.load(query + heads[:, None] * query_head + columns[None, :], mask=asked, other=0.0)
        q = q.to(tl.float32) if UPCAST else q
        top = tl.full((BLOCK_H,), _LOWEST, tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    else:
        # Vectors, not tiles of one row: the layout of such a tile would become that of the keys.
        heads = 0
        there = True
        asked = columns < DIM
        q = tl.load(query + columns, mask=asked, other=0.0).to(tl.float32)[None, :] * scale
        top = tl.full((BLOCK_N,), _LOWEST, tl.float32)
        total = tl.zeros((BLOCK_N,), tl.float32)
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    last = offset + tl.maximum(end - 1, 0)
    if DOT:
        blocks = token_blocks(table, offset + begin + tokens, last, BLOCK_SIZE)
    for start in tl.range(begin, end, BLOCK_N, num_stages=None if DOT else STAGES):
        position = start + tokens
        seen = position < end
        if not DOT:
            blocks = token_blocks(table, offset + position, last, BLOCK_SIZE)
        rows = token_rows(blocks, offset + position, last, block_stride, step, BLOCK_SIZE)
        k = load_rows(keys, rows, columns, DIM, BLOCK_D)
        v = load_rows(values, rows, columns, DIM, BLOCK_D)
        if DOT:
            # Prefetch the next tile's blocks: keys and values wait for their own loads only.
            blocks = token_blocks(table, offset + position + BLOCK_N, last, BLOCK_SIZE)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        else:
            scores = tl.where(seen, tl.sum(q * k.to(tl.float32), 1), float("-inf"))
            higher = tl.maximum(top, scores)
            weights = tl.exp2(scores - higher)
            shrink = tl.exp2(top - higher)
            total = total * shrink + weights
            acc = acc * shrink[:, None] + weights[:, None] * v.to(tl.float32)
        top = higher
    if not DOT:
        higher = tl.max(top, 0)
        shrink = tl.exp2(top - higher)
        total = tl.sum(total * shrink, 0)
        acc = tl.sum(acc * shrink[:, None], 0)
        top = higher
    head = kv_head * GROUP + heads
    num_heads = tl.num_programs(0) * GROUP
    if SPLIT:
        row = (tl.program_id(1).to(tl.int64) * num_heads + head) * tl.num_programs(2) + tl.program_id(2)
        tl.store(stats + row * 2, top, mask=there)
        tl.store(stats + row * 2 + 1, total, mask=there)
        place = sums + (row[:, None] * DIM + columns[None, :] if DOT else row * DIM + columns)
        tl.store(place, acc, mask=asked)
    else:
        # No keys, as in padding: zeros.
        total = tl.where(total > 0, total, 1.0)
        row = token * num_heads + head
        place = out + (row[:, None] * DIM + columns[None, :] if DOT else row * DIM + columns)
        acc = acc / (total[:, None] if DOT else total)
        tl.store(place, acc.to(out.dtype.element_ty), mask=asked)


@jit
def _reduce(
    out,
    sums,
    stats,
    segments,
    query_start,
    splits,
    INDEXED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (sequence, head): combines the results of the splits."""
    segment = tl.program_id(0).to(tl.int64)
    row = segment * tl.num_programs(1) + tl.program_id(1)
    token = segment
    if INDEXED:
        token = tl.load(query_start + tl.load(segments + segment))
    split = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_D)
    there = split < splits
    top = tl.load(stats + (row * splits + split) * 2, mask=there, other=_LOWEST)
    total = tl.load(stats + (row * splits + split) * 2 + 1, mask=there, other=0.0)
    wanted = (there & (total > 0))[:, None] & (columns < DIM)[None, :]
    part = tl.load(sums + (row * splits + split)[:, None] * DIM + columns[None, :], mask=wanted, other=0.0)
    shrink = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(total * shrink, 0)
    acc = tl.sum(part * shrink[:, None], 0) / tl.where(total > 0, total, 1.0)
    place = out + (token * tl.num_programs(1) + tl.program_id(1)) * DIM + columns
    tl.store(place, acc.to(out.dtype.element_ty), mask=columns < DIM)


def decode_configs(group: int, dim: int, itemsize: int) -> list[dict[str, int]]:
    """Candidate sizes, the default first. STAGES: see `_decode`. maxnreg: where the compiler would keep fewer registers
    than shared memory lets a multiprocessor use, and spill."""
    rows = 4096 // (padded(dim) * itemsize)  # a quarter of the bytes that must be in flight
    dots = [
        {"DOT": 1, "BLOCK_N": max(16, rows * n), "STAGES": stages, "num_warps": warps}
        for n, stages, warps in ((4, 3, 4), (2, 4, 4), (4, 2, 4), (2, 3, 2), (8, 2, 4))
    ]
    dots[1]["maxnreg"] = 128
    if group > 1:
        return dots
    plain = [
        {"DOT": 0, "BLOCK_N": max(4, rows * n), "STAGES": stages, "num_warps": warps}
        for n, stages, warps in ((1, 4, 4), (2, 3, 4), (1, 4, 2), (4, 3, 8))
    ]
    return plain + dots[:2]


def choose_splits(sequences: int, kv_heads: int, slots: int, processors: int) -> int:
    """Number of programs that share a sequence's keys: a power of two, from shapes only, so that a graph can replay it.

    slots: number covered by a block table's width. Eight programs per multiprocessor balance contexts of unequal
    length.
    """
    splits = 1
    most = min(SPLITS[-1], slots // LEAST_KEYS)
    while splits * 2 <= most and sequences * kv_heads * splits < 8 * processors:
        splits *= 2
    return splits


def decode_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: PackedBatch,
    *,
    scale: float,
    window: int,
    splits: int,
    config: Mapping[str, int],
    segments: torch.Tensor | None = None,
) -> None:
    """Attend for the tokens of these segments of length one; None: all segments of a batch of decodes.

    out: [T, heads, head_dim], contiguous; the segments' rows are written. query: [T, heads, head_dim]. keys, values:
    one layer of the cache, with the new tokens written. splits: see `choose_splits`. config: one of `decode_configs`.
    """
    heads, dim = query.shape[1:]
    kv_heads, block_size = keys.shape[2], keys.shape[1]
    count = len(batch.lengths) if segments is None else segments.shape[0]
    split = splits > 1
    index = batch.query_start if segments is None else segments
    sums = torch.empty((count, heads, splits, dim), dtype=torch.float32, device=query.device) if split else out
    stats = torch.empty((count, heads, splits, 2), dtype=torch.float32, device=query.device) if split else out
    block_d, dot = padded(dim), config["DOT"]
    _decode[(kv_heads, count, splits)](
        out, sums, stats, query, keys, values, batch.block_tables, batch.context_lens, batch.offsets, batch.reversed,
        index, batch.query_start, scale * _LOG2E, window, query.stride(0), query.stride(1), keys.stride(0),
        batch.block_tables.stride(0),
        INDEXED=segments is not None, SPLIT=split, GROUP=heads // kv_heads, DIM=dim, BLOCK_SIZE=block_size,
        SLOT_STRIDE=keys.stride(1), HEAD_STRIDE=keys.stride(2), UPCAST=INTERPRETED,
        BLOCK_H=padded(heads // kv_heads) if dot else 1, BLOCK_D=block_d,
        num_stages=config["STAGES"], **config,
    )  # fmt: skip
    if split:
        _reduce[(count, heads)](
            out, sums, stats, index, batch.query_start, splits,
            INDEXED=segments is not None, DIM=dim, BLOCK_S=splits, BLOCK_D=block_d,
            num_warps=min(8, max(2, splits * block_d // 2048)),  # at most 64 sums in a thread: more spill
        )  # fmt: skip
