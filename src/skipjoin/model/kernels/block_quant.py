from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from skipjoin.kv_format import Int8Channels
from skipjoin.model.kv_cache import PagedKV, SwapPool
from skipjoin.model.ops.block_copy import MIN_RUN_BYTES
from skipjoin.model.ops.block_quant import StagedQuantizer, new_rows
from skipjoin.model.transfer import send

# Programs that fill the link when a program requests one head before it waits, about 2.5 KiB when dequantizing, and
# programs that convert on the device.
_LINK_PROGRAMS, _PROGRAMS = 64, 528
# Numbers of a head that a program converts at a time.
_TILE = 4096
# A fused multiply-add rounds once where other implementations round twice.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_INFINITE = tl.constexpr(Int8Channels.INFINITE)
_MIN_SCALE = tl.constexpr(Int8Channels.MIN_SCALE)
# Adding and subtracting it rounds numbers from 0 to 255 to the nearest integer, ties to even.
_ROUNDING = tl.constexpr(2.0**23)
# One version for all moves, so that no step waits for a compilation.
_IDS = ["target_ids", "source_ids"]
# Heads, tokens and channels of a block, and the blocks of a move in target and source.
_Shape = tuple[int, int, int]
_Ids = tuple[Sequence[int], Sequence[int]]


@triton.jit
def _cut(x: tl.tensor, UP: tl.constexpr) -> tl.tensor:
    """Return the nearest bfloat16 not above x, or not below it if UP, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    cut = bits & -65536
    # Cutting rounds towards zero, which is right for one sign.
    is_wrong = (bits != cut) & ((x >= 0) if UP else (x < 0))
    return tl.where(is_wrong, cut + 65536, cut).to(tl.float32, bitcast=True)


@triton.jit
def _head_of(work: tl.tensor, heads: tl.tensor, ids: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return tl.load(ids + work // heads).to(tl.int64), (work % heads).to(tl.int64)


@triton.jit(do_not_specialize=["blocks", "last"], do_not_specialize_on_alignment=_IDS)
def _quantize(
    codes: tl.tensor, scales: tl.tensor, device: tl.tensor, target_ids: tl.tensor, source_ids: tl.tensor,
    blocks: tl.tensor, last: tl.tensor, heads: tl.tensor,
    TOKENS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    channel = tl.arange(0, WIDTH)
    rows = tl.arange(0, ROWS)
    row_bytes = heads * DIM * (TOKENS + 4)
    for work in range(tl.program_id(0), blocks * heads, tl.num_programs(0)):
        source, head = _head_of(work, heads, source_ids)
        target, _ = _head_of(work, heads, target_ids)
        count = tl.where(work // heads == blocks - 1, last, TOKENS)
        base = device + (source * heads + head) * TOKENS * DIM
        low = tl.full([WIDTH], float("inf"), tl.float32)
        high = tl.full([WIDTH], float("-inf"), tl.float32)
        for first in range(0, TOKENS, ROWS):
            token = first + rows
            inside = (token < count)[:, None] & (channel < DIM)[None, :]
            x = tl.load(base + token[:, None] * DIM + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            # False for NaN.
            counts = inside & (tl.abs(x) < _INFINITE)
            low = tl.minimum(low, tl.min(tl.where(counts, x, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(counts, x, float("-inf")), 0))
        has_any = low <= high
        low, high = _cut(tl.where(has_any, low, 0.0), False), tl.where(has_any, high, 0.0)
        scale = _cut(tl.div_rn(high - low, 255.0), True)
        scale = tl.maximum(scale, _MIN_SCALE)
        inverse = tl.div_rn(1.0, scale)
        place = scales + target * (row_bytes // 2) + head * 2 * DIM + channel
        tl.store(place, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=channel < DIM)
        tl.store(place + DIM, (low.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=channel < DIM)
        to = codes + target * row_bytes + heads * 4 * DIM + head * TOKENS * DIM
        for first in range(0, TOKENS, ROWS):
            token = first + rows
            inside = (token < count)[:, None] & (channel < DIM)[None, :]
            x = tl.load(base + token[:, None] * DIM + channel[None, :], mask=inside, other=0.0).to(tl.float32)
            # NaN becomes the minimum.
            x = tl.where(x > low[None, :], tl.minimum(x, high[None, :]), low[None, :])
            code = (x - low[None, :]) * inverse[None, :]
            code = tl.where((token < count)[:, None], (code + _ROUNDING) - _ROUNDING, 0.0)
            is_slot = (token < TOKENS)[:, None] & (channel < DIM)[None, :]
            tl.store(to + token[:, None] * DIM + channel[None, :], code.to(tl.uint8), mask=is_slot)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=_IDS)
def _dequantize(
    device: tl.tensor, codes: tl.tensor, scales: tl.tensor, target_ids: tl.tensor, source_ids: tl.tensor,
    blocks: tl.tensor, heads: tl.tensor, most: tl.tensor,
    TOKENS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    channel = tl.arange(0, WIDTH)
    rows = tl.arange(0, ROWS)
    row_bytes = heads * DIM * (TOKENS + 4)
    for work in range(tl.program_id(0), blocks * heads, tl.num_programs(0)):
        source, head = _head_of(work, heads, source_ids)
        target, _ = _head_of(work, heads, target_ids)
        place = scales + source * (row_bytes // 2) + head * 2 * DIM + channel
        scale = tl.load(place, mask=channel < DIM, other=0).to(tl.int32) << 16
        low = tl.load(place + DIM, mask=channel < DIM, other=0).to(tl.int32) << 16
        scale, low = scale.to(tl.float32, bitcast=True), low.to(tl.float32, bitcast=True)
        base = codes + source * row_bytes + heads * 4 * DIM + head * TOKENS * DIM
        to = device + (target * heads + head) * TOKENS * DIM
        for first in range(0, TOKENS, ROWS):
            token = first + rows
            inside = (token < TOKENS)[:, None] & (channel < DIM)[None, :]
            at = token[:, None] * DIM + channel[None, :]
            # Read once: must not evict cached data of concurrent steps.
            code = tl.load(base + at, mask=inside, other=0, eviction_policy="evict_first").to(tl.float32)
            x = low[None, :] + scale[None, :] * code
            x = tl.minimum(tl.maximum(x, -most), most)
            tl.store(to + at, x.to(device.dtype.element_ty), mask=inside, eviction_policy="evict_first")


class TritonQuantizer(StagedQuantizer):
    """Triton quantizer on the current stream. The CPU pool must be page-locked, or on the device.

    Copy engines move large rows, because kernels that wait for the link slow concurrent steps down. Kernels access
    small rows in CPU memory, since queueing a copy of each would take longer.
    """

    def quantize(
        self, host: SwapPool, device: PagedKV, target: Sequence[int], source: Sequence[int], last: int
    ) -> None:
        if host.block_bytes < MIN_RUN_BYTES:
            _launch_quantize(_LINK_PROGRAMS, host.tensor, device, host.shape, (target, source), last)
        else:
            super().quantize(host, device, target, source, last)

    def dequantize(self, device: PagedKV, host: SwapPool, target: Sequence[int], source: Sequence[int]) -> None:
        if host.block_bytes < MIN_RUN_BYTES:
            _launch_dequantize(_LINK_PROGRAMS, device, host.tensor, host.shape, (target, source))
        else:
            super().dequantize(device, host, target, source)

    def to_rows(self, host: SwapPool, device: PagedKV, source: Sequence[int], last: int) -> torch.Tensor:
        rows = new_rows(host, device, len(source))
        _launch_quantize(_PROGRAMS, rows, device, host.shape, (range(len(source)), source), last)
        return rows

    def from_rows(self, device: PagedKV, host: SwapPool, target: Sequence[int], rows: torch.Tensor) -> None:
        _launch_dequantize(_PROGRAMS, device, rows, host.shape, (target, range(len(target))))


def _launch_quantize(programs: int, rows: torch.Tensor, device: PagedKV, shape: _Shape, ids: _Ids, last: int) -> None:
    blocks, count = device.head_view(), len(ids[0])
    to, source = send(ids, blocks.device, torch.int64)
    _quantize[(min(programs, count * shape[0]),)](
        rows, rows.view(torch.int16), blocks, to, source, count, last, shape[0], **_tile(shape)
    )


def _launch_dequantize(programs: int, device: PagedKV, rows: torch.Tensor, shape: _Shape, ids: _Ids) -> None:
    blocks, count = device.head_view(), len(ids[0])
    to, source = send(ids, blocks.device, torch.int64)
    most = torch.finfo(blocks.dtype).max
    _dequantize[(min(programs, count * shape[0]),)](
        blocks, rows, rows.view(torch.int16), to, source, count, shape[0], most, **_tile(shape)
    )


def _tile(shape: _Shape) -> dict[str, int]:
    _, tokens, dim = shape
    width = triton.next_power_of_2(dim)
    rows = min(triton.next_power_of_2(tokens), max(1, _TILE // width))
    return {"TOKENS": tokens, "DIM": dim, "ROWS": rows, "WIDTH": width, **_OPTIONS}
