from __future__ import annotations

import torch
import triton
import triton.language as tl

# A link of 64 GB/s with a latency of 2 us has 128 KiB in flight. A program requests 16 KiB before it waits, so eight
# programs fill the link. Twice as many are launched, since they do not wait at the same time. Steps run concurrently: a
# GPU has at least six times as many multiprocessors, and a program takes a sixteenth of one.
_PROGRAMS = 16
# Words of 4 bytes that a program moves at a time: 8 loads of 16 bytes for each of 128 threads.
_CHUNK, _WARPS = 4096, 4
# Spans are short: a slot of one head is 64 words with 16-bit numbers.
_SPAN_CHUNK = 512


# One version for all numbers of blocks and all alignments of their ids, so that no step waits for a compilation.
@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["target_ids", "source_ids"])
def _copy(
    target: tl.tensor, source: tl.tensor, target_ids: tl.tensor, source_ids: tl.tensor, blocks: tl.tensor,
    words: tl.tensor, target_stride: tl.tensor, source_stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    chunks = tl.cdiv(words, CHUNK)
    for work in range(tl.program_id(0), blocks * chunks, tl.num_programs(0)):
        block = work // chunks
        place = (work % chunks) * CHUNK + tl.arange(0, CHUNK)
        inside = place < words
        first = tl.load(source_ids + block) * source_stride
        first_to = tl.load(target_ids + block) * target_stride
        # Read once: must not evict cached data of concurrent steps.
        moved = tl.load(source + first + place, mask=inside, eviction_policy="evict_first")
        tl.store(target + first_to + place, moved, mask=inside, eviction_policy="evict_first")


def copy_blocks(target: torch.Tensor, source: torch.Tensor, target_ids: torch.Tensor, source_ids: torch.Tensor) -> None:
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(f"rows of {source.dtype} {source.shape[1]} do not fit {target.dtype} {target.shape[1]}")
    count = len(source_ids)
    if not count:
        return
    to, rows = _words(target), _words(source)
    words = rows.shape[1]
    grid = (min(_PROGRAMS, count * triton.cdiv(words, _CHUNK)),)
    _copy[grid](
        to, rows, target_ids, source_ids, count, words, to.stride(0), rows.stride(0), CHUNK=_CHUNK, num_warps=_WARPS
    )


@triton.jit(do_not_specialize=["count"])
def _copy_slots(
    target: tl.tensor, source: tl.tensor, spans: tl.tensor, count: tl.tensor, heads: tl.tensor,
    block_words: tl.tensor, slot_words: tl.tensor, head_words: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    for work in range(tl.program_id(0), count * heads, tl.num_programs(0)):
        span, head = work // heads, work % heads
        first = head * head_words + tl.load(spans + 2 * count + span) * slot_words
        words = tl.load(spans + 3 * count + span) * slot_words
        to = tl.load(spans + span) * block_words + first
        block = tl.load(spans + count + span) * block_words + first
        for begin in range(0, words, CHUNK):
            place = begin + tl.arange(0, CHUNK)
            inside = place < words
            moved = tl.load(source + block + place, mask=inside, eviction_policy="evict_first")
            tl.store(target + to + place, moved, mask=inside, eviction_policy="evict_first")


def copy_spans(target: torch.Tensor, source: torch.Tensor, spans: torch.Tensor) -> None:
    """Copy slots of `source` to the same slots of `target`, for all heads, on the current stream.

    Pools are contiguous [blocks, heads, block_size, head_dim], on the device or page-locked. They may be the same if no
    block is both read and written. Spans are target blocks, source blocks, first slots and counts, int64 [4, n] on the
    device, not checked.
    """
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(f"blocks of {source.dtype} {source.shape[1:]} do not fit {target.dtype} {target.shape[1:]}")
    count, (heads, size, dim) = spans.shape[1], target.shape[1:]
    if not count:
        return
    to, rows = _words(target.flatten(1)), _words(source.flatten(1))
    slot = dim * target.element_size() // to.element_size()
    if slot * size * heads != to.shape[1]:  # a word would cover parts of two slots
        to, rows = (pool.flatten(1).view(torch.uint8) for pool in (target, source))
        slot = dim * target.element_size()
    _copy_slots[(min(_PROGRAMS, count * heads),)](
        to, rows, spans, count, heads, to.shape[1], slot, slot * size, CHUNK=_SPAN_CHUNK, num_warps=_WARPS
    )


def _words(pool: torch.Tensor) -> torch.Tensor:
    row_bytes = pool.shape[1] * pool.element_size()
    whole = row_bytes % 4 == 0 and pool.stride(0) * pool.element_size() % 4 == 0
    return pool.view(torch.int32 if whole else torch.uint8)
