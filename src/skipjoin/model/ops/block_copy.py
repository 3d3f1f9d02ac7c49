from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64, c_void_p

from skipjoin.model.ops.build import declare, load_library

# Mean size of runs that CUDA's copies transfer well. Queueing one takes 5 to 13 us of CPU time, in which the link
# transfers this much or more.
MIN_RUN_BYTES = 256 << 10

# Arguments: addresses of target and source pool, bytes per block, and the blocks: source[i] is copied to target[i].
# They are not checked: wrong ones corrupt memory.
BlockCopy = Callable[[int, int, int, Sequence[int], Sequence[int]], None]
# Target blocks, source blocks, the first slot in each, and the number of slots.
Spans = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
# Heads of a block, its slots, and bytes of a slot of one head.
BlockShape = tuple[int, int, int]
# Arguments: addresses of target and source pool, the shape of their blocks, and the spans, which keep their slots. They
# are not checked either.
SpanCopy = Callable[[int, int, BlockShape, Spans], None]


def runs_of(target: Sequence[int], source: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (target, source, blocks) of each run that is consecutive on both sides."""
    begin = 0
    for end in range(1, len(source) + 1):
        follows = end < len(source) and source[end] == source[end - 1] + 1 and target[end] == target[end - 1] + 1
        if not follows:
            yield target[begin], source[begin], end - begin
            begin = end


@functools.cache
def block_copy() -> BlockCopy:
    library = load_library()
    return plain_copy if library is None else compiled_copy(library)


def compiled_copy(library: ctypes.CDLL) -> BlockCopy:
    call = declare(library.skipjoin_copy_blocks, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)

    def copy(target: int, source: int, block_bytes: int, to: Sequence[int], blocks: Sequence[int]) -> None:
        # Named variables keep the arrays alive: the call reads them by address.
        targets, sources = array("q", to), array("q", blocks)
        call(target, source, block_bytes, targets.buffer_info()[0], sources.buffer_info()[0], len(sources))

    return copy


def plain_copy(target: int, source: int, block_bytes: int, to: Sequence[int], blocks: Sequence[int]) -> None:
    for first_to, first, count in runs_of(to, blocks):
        ctypes.memmove(target + first_to * block_bytes, source + first * block_bytes, count * block_bytes)


@functools.cache
def span_copy() -> SpanCopy:
    library = load_library()
    return plain_span_copy if library is None else compiled_span_copy(library)


def compiled_span_copy(library: ctypes.CDLL) -> SpanCopy:
    sizes = c_int64, c_int64, c_int64
    call = declare(library.skipjoin_copy_spans, c_void_p, c_void_p, *sizes, *[c_void_p] * 4, c_int64)

    def copy(target: int, source: int, shape: BlockShape, spans: Spans) -> None:
        # A named variable keeps the arrays alive: the call reads them by address.
        arrays = [array("q", part) for part in spans]
        addresses = [part.buffer_info()[0] for part in arrays]
        call(target, source, *shape, *addresses, len(arrays[0]))

    return copy


def plain_span_copy(target: int, source: int, shape: BlockShape, spans: Spans) -> None:
    heads, size, slot_bytes = shape
    for to, block, first, count in zip(*spans, strict=True):
        for head in range(heads):
            there, here = ((number * heads + head) * size + first for number in (to, block))
            ctypes.memmove(target + there * slot_bytes, source + here * slot_bytes, count * slot_bytes)
