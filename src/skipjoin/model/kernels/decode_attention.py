"""Attention of one query token per sequence over the paged cache.

A sequence's keys are split into chunks by its own length, and with one chunk size for all batches, so that results do
not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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

# Below every score, and finite: the difference of two of them is zero, not NaN.
_LOWEST = tl.constexpr(-1.0e30)
# Default chunk size granularity: chunks are the smallest multiple of it with which a sequence has at most MAX_CHUNKS.
# With fewer keys, partial results would exceed a few percent of the bytes that are read.
CHUNK_KEYS = 256
MAX_CHUNKS = 64
_MAX_CHUNKS = tl.constexpr(MAX_CHUNKS)
# Programs per multiprocessor, more than it holds at a time: those that start last balance the others.
_PROGRAMS = 8
# int32 values per record: a record is one sector of memory.
_ITEM, _SEQUENCE = tl.constexpr(8), tl.constexpr(4)
# Lengths that a program of `_share_out` compares at a time, and partial results that one of `_reduce` adds at a time.
_LENGTHS, _PARTS = tl.constexpr(128), tl.constexpr(16)


class WorkList(NamedTuple):
    """Work of the programs for a batch of decodes. Tensors are int32 on the device.

    Attributes:
        items: Shape [maximum, 8], a record per chunk, sorted by keys, descending: (segment, token, first position, end,
            whether reversed, number of chunks of its sequence, -, -).
        sequences: Shape [n, 4]: (its first item, number of chunks, token, -).
    """

    items: torch.Tensor
    sequences: torch.Tensor
    total: torch.Tensor


def max_chunks(slots: int, chunk: int) -> int:
    return min(MAX_CHUNKS, -(-slots // chunk))


@triton.jit
def _chunks(
    context: tl.tensor, window: tl.tensor, CHUNK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    low = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    keys = context - low
    size = tl.maximum(tl.cdiv(tl.cdiv(keys, _MAX_CHUNKS), CHUNK), 1) * CHUNK
    return low, keys, size, tl.maximum(tl.cdiv(keys, size), 1)


@jit
def _share_out(
    items: tl.tensor, sequences: tl.tensor, total: tl.tensor, context_lens: tl.tensor, backward: tl.tensor,
    segments: tl.tensor, query_start: tl.tensor, count: tl.tensor, window: tl.tensor,
    INDEXED: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    own = tl.program_id(0)
    segment = tl.load(segments + own).to(tl.int32) if INDEXED else own
    token = tl.load(query_start + segment).to(tl.int32) if INDEXED else own
    context = tl.load(context_lens + segment).to(tl.int32)
    low, keys, size, chunks = _chunks(context, window, CHUNK)
    first = 0
    everything = 0
    for start in range(0, count, _LENGTHS):
        other = start + tl.arange(0, _LENGTHS)
        there = other < count
        place = tl.load(segments + other, mask=there, other=0) if INDEXED else other
        _, their_keys, their_size, their_chunks = _chunks(
            tl.load(context_lens + place, mask=there, other=0).to(tl.int32), window, CHUNK
        )
        their_chunks = tl.where(there, their_chunks, 0)
        more = tl.minimum(their_keys, their_size) - tl.minimum(keys, size)
        earlier = (more > 0) | ((more == 0) & (other < own))
        first += tl.sum(tl.where(earlier, their_chunks, 0), 0)  # type: ignore[assignment]  # no longer a constant
        everything += tl.sum(their_chunks, 0)  # type: ignore[assignment]  # no longer a constant
    if own == 0:
        tl.store(total, everything)
    tl.store(sequences + own * _SEQUENCE, first)
    tl.store(sequences + own * _SEQUENCE + 1, chunks)
    tl.store(sequences + own * _SEQUENCE + 2, token)
    chunk = tl.arange(0, _MAX_CHUNKS)
    begin = low + chunk * size
    there = chunk < chunks
    record = items + (first + chunk) * _ITEM
    whole = tl.zeros_like(chunk)
    tl.store(record, whole + segment, mask=there)
    tl.store(record + 1, whole + token, mask=there)
    tl.store(record + 2, begin, mask=there)
    tl.store(record + 3, tl.minimum(begin + size, context), mask=there)
    tl.store(record + 4, whole + tl.load(backward + segment).to(tl.int32), mask=there)
    tl.store(record + 5, whole + chunks, mask=there)


@jit
def _decode(
    out: tl.tensor, sums: tl.tensor, stats: tl.tensor, query: tl.tensor, keys: tl.tensor, values: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor, tables: tl.tensor, items: tl.tensor, total_items: tl.tensor,
    sinks: tl.tensor, scale: tl.tensor, inner: tl.tensor, query_token: tl.tensor, query_head: tl.tensor,
    block_stride: tl.tensor, table_width: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, UPCAST: tl.constexpr, SCALED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    DOT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Attend for all query heads of a group, over a strided subset of the items.

    A program is (key-value head, number). Heads are the first grid axis because the keys of a block's heads are
    adjacent. A sequence with one chunk is written to `out`, partial results to `sums` and `stats`.

    Args:
        DOT: Compute scores with tensor cores. Otherwise, for a group of one, use one softmax per row, so that threads
            exchange data only at the end.
        STAGES: Tiles of keys and values in flight, minus one. With DOT it is a launch option, because a loop option
            would also delay loads of the block table.
    """
    kv_head = tl.program_id(0)
    tokens = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    # Vectors without DOT, not tiles of one row: the layout of such a tile would become that of the keys.
    heads = tl.arange(0, BLOCK_H) if DOT else 0
    there = heads < GROUP if DOT else True
    asked = there[:, None] & (columns < DIM)[None, :] if DOT else columns < DIM  # type: ignore[index]  # a tile if DOT
    num_heads = tl.num_programs(0) * GROUP
    head = kv_head * GROUP + heads
    query += kv_head * GROUP * query_head
    keys += kv_head * HEAD_STRIDE
    values += kv_head * HEAD_STRIDE
    if SCALED:
        key_scales += kv_head * HEAD_STRIDE // 4
        value_scales += kv_head * HEAD_STRIDE // 4
    for item in range(tl.program_id(1), tl.load(total_items), tl.num_programs(1)):
        record = items + item * _ITEM
        segment = tl.load(record).to(tl.int64)
        token = tl.load(record + 1).to(tl.int64)
        begin = tl.load(record + 2)
        end = tl.load(record + 3)
        down = tl.load(record + 4)
        chunks = tl.load(record + 5)
        table = tables + segment * table_width
        turn = tl.where(down > 0, (BLOCK_SIZE - 1) * SLOT_STRIDE, 0)
        step = tl.where(down > 0, -SLOT_STRIDE, SLOT_STRIDE)
        asking = query + token * query_token
        if DOT:
            place = heads[:, None] * query_head + columns[None, :]  # type: ignore[index]  # a tile if DOT
            q = tl.load(asking + place, mask=asked, other=0.0)
            q = q.to(tl.float32) if UPCAST else q
            top = tl.full((BLOCK_H,), _LOWEST, tl.float32)
            total = tl.zeros((BLOCK_H,), tl.float32)
            acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        else:
            q = tl.load(asking + columns, mask=asked, other=0.0).to(tl.float32)[None, :] * (inner if CAPPED else scale)
            top = tl.full((BLOCK_N,), _LOWEST, tl.float32)
            total = tl.zeros((BLOCK_N,), tl.float32)
            acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        if SINKS:
            # `_reduce` adds the sink to several chunks, and without DOT the first of the rows has it.
            own = chunks == 1 if DOT else (tokens == 0) & (chunks == 1)
            top = tl.where(own, tl.load(sinks + tl.minimum(head, num_heads - 1)) * LOG2E, top)
            total = tl.where(own, 1.0, total)
        last = tl.maximum(end - 1, 0)
        if DOT:
            blocks = token_blocks(table, begin + tokens, last, BLOCK_SIZE)
        for start in tl.range(begin, end, BLOCK_N, num_stages=None if DOT else STAGES):
            index = start + tokens
            seen = index < end
            if not DOT:
                blocks = token_blocks(table, index, last, BLOCK_SIZE)
            rows = token_rows(blocks, index, last, block_stride, step, BLOCK_SIZE) + turn
            k = load_rows(keys, rows, columns, DIM, BLOCK_D)
            v = load_rows(values, rows, columns, DIM, BLOCK_D)
            if SCALED:
                key_scale = load_scales(key_scales, rows)
                value_scale = load_scales(value_scales, rows)
            if DOT:
                # Prefetch the next tile's blocks: keys and values wait for their own loads only.
                blocks = token_blocks(table, index + BLOCK_N, last, BLOCK_SIZE)
                if UPCAST or SCALED:
                    k = k.to(q.dtype)
                    v = v.to(q.dtype)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                if not CAPPED:
                    scores *= scale
                if SCALED:
                    scores *= key_scale[None, :]
                if CAPPED:
                    scores = bounded(scores * inner) * scale
                scores = tl.where(seen[None, :], scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                weights = tl.exp2(scores - higher[:, None])
                shrink = tl.exp2(top - higher)
                total = total * shrink + tl.sum(weights, 1)
                if SCALED:
                    weights *= value_scale[None, :]
                acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            else:
                scores = tl.sum(q * k.to(tl.float32), 1)
                if SCALED:
                    scores *= key_scale
                if CAPPED:
                    scores = bounded(scores) * scale
                scores = tl.where(seen, scores, float("-inf"))
                higher = tl.maximum(top, scores)
                weights = tl.exp2(scores - higher)
                shrink = tl.exp2(top - higher)
                total = total * shrink + weights
                if SCALED:
                    weights *= value_scale
                acc = acc * shrink[:, None] + weights[:, None] * v.to(tl.float32)
            top = higher
        if not DOT:
            higher = tl.max(top, 0)
            shrink = tl.exp2(top - higher)
            total = tl.sum(total * shrink, 0)
            acc = tl.sum(acc * shrink[:, None], 0)
            top = higher
        if chunks > 1:
            row = (item * num_heads + head).to(tl.int64)
            tl.store(stats + row * 2, top, mask=there)
            tl.store(stats + row * 2 + 1, total, mask=there)
            tl.store(sums + (row[:, None] * DIM + columns[None, :] if DOT else row * DIM + columns), acc, mask=asked)
        else:
            # No keys, as in padding: zeros.
            least = tl.where(total > 0, total, 1.0)
            found = (acc / (least[:, None] if DOT else least)).to(out.dtype.element_ty)
            row = token * num_heads + head
            tl.store(out + (row[:, None] * DIM + columns[None, :] if DOT else row * DIM + columns), found, mask=asked)


@jit
def _reduce(
    out: tl.tensor, sums: tl.tensor, stats: tl.tensor, sequences: tl.tensor, sinks: tl.tensor,
    SINKS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    record = sequences + tl.program_id(0) * _SEQUENCE
    first = tl.load(record)
    chunks = tl.load(record + 1)
    token = tl.load(record + 2).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)
    if chunks > 1:
        top = tl.full((), _LOWEST, tl.float32)
        total = tl.full((), 0.0, tl.float32)
        if SINKS:
            top = tl.load(sinks + head) * LOG2E
            total += 1.0
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, chunks, _PARTS):
            chunk = start + tl.arange(0, _PARTS)
            there = chunk < chunks
            row = (first + chunk).to(tl.int64) * tl.num_programs(1) + head
            tops = tl.load(stats + row * 2, mask=there, other=_LOWEST)
            totals = tl.load(stats + row * 2 + 1, mask=there, other=0.0)
            wanted = there[:, None] & (columns < DIM)[None, :]
            part = tl.load(sums + row[:, None] * DIM + columns[None, :], mask=wanted, other=0.0)
            higher = tl.maximum(top, tl.max(tops, 0))
            shrink = tl.exp2(tops - higher)
            total = total * tl.exp2(top - higher) + tl.sum(totals * shrink, 0)
            acc = acc * tl.exp2(top - higher) + tl.sum(part * shrink[:, None], 0)
            top = higher
        place = out + (token * tl.num_programs(1) + head) * DIM + columns
        tl.store(place, (acc / total).to(out.dtype.element_ty), mask=columns < DIM)


def decode_configs(group: int, dim: int, itemsize: int) -> list[dict[str, int]]:
    """Return candidate sizes, the default first; CHUNK is that of the work list. `maxnreg` prevents spills."""
    rows = 4096 // (padded(dim) * itemsize)  # a quarter of the bytes that must be in flight
    dots = [
        {"DOT": 1, "BLOCK_N": max(16, rows * n), "STAGES": stages, "num_warps": warps, "CHUNK": CHUNK_KEYS}
        for n, stages, warps in ((4, 3, 4), (2, 4, 4), (4, 2, 4), (2, 3, 2), (8, 2, 4))
    ]
    dots[1]["maxnreg"] = 128
    if group > 1:
        return dots
    plain = [
        {"DOT": 0, "BLOCK_N": max(4, rows * n), "STAGES": stages, "num_warps": warps, "CHUNK": CHUNK_KEYS}
        for n, stages, warps in ((1, 4, 4), (2, 3, 4), (1, 4, 2), (4, 3, 8))
    ]
    plain[3]["maxnreg"] = 128
    return plain + dots[:2]


def share_out(
    batch: PackedBatch, segments: torch.Tensor | None = None, *, window: int, chunk: int = CHUNK_KEYS
) -> WorkList:
    """Return the work list of segments of one token. Shapes do not depend on lengths, so a graph can replay it."""
    count = len(batch.lengths) if segments is None else segments.shape[0]
    most = count * max_chunks(batch.block_tables.shape[1] * batch.block_size, chunk)
    items, sequences, total = (
        torch.empty(size, dtype=torch.int32, device=batch.context_lens.device) for size in ((most, 8), (count, 4), 1)
    )
    _share_out[(count,)](
        items, sequences, total, batch.context_lens, batch.reversed,
        batch.query_start if segments is None else segments, batch.query_start, count, window,
        INDEXED=segments is not None, CHUNK=chunk,
    )  # fmt: skip
    return WorkList(items, sequences, total)


def decode_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    tables: torch.Tensor,
    work: WorkList,
    *,
    softmax: Softmax,
    processors: int,
    config: Mapping[str, int],
) -> None:
    """Attend for the segments of `work`, and write their rows of `out`, which is contiguous.

    `work` must be shared out with config["CHUNK"].
    """
    sizes = {name: value for name, value in config.items() if name != "CHUNK"}
    heads, dim = query.shape[1:]
    kv_heads, block_size = keys.shape[2], keys.shape[1]
    count, most = work.sequences.shape[0], work.items.shape[0]
    parts = most if most > count else 0  # with as many items as sequences, none has several
    sums = torch.empty((parts, heads, dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((parts, heads, 2), dtype=torch.float32, device=query.device)
    sinks = query if softmax.sinks is None else softmax.sinks
    block_d, dot = padded(dim), config["DOT"]
    _decode[(kv_heads, min(most, -(-_PROGRAMS * processors // kv_heads)))](
        out, sums, stats, query, keys, values, *(scales or (keys, values)), tables, work.items, work.total,
        sinks, *score_factors(softmax), query.stride(0), query.stride(1), keys.stride(0), tables.stride(0),
        GROUP=heads // kv_heads, DIM=dim, BLOCK_SIZE=block_size,
        SLOT_STRIDE=keys.stride(1), HEAD_STRIDE=keys.stride(2), UPCAST=INTERPRETED,
        SCALED=scales is not None, CAPPED=softmax.cap != 0, SINKS=softmax.sinks is not None,
        BLOCK_H=padded(heads // kv_heads) if dot else 1, BLOCK_D=block_d,
        num_stages=config["STAGES"], **sizes,
    )  # fmt: skip
    if parts:
        _reduce[(count, heads)](
            out, sums, stats, work.sequences, sinks,
            SINKS=softmax.sinks is not None, DIM=dim, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip
