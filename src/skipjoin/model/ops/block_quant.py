"""KV quantization: blocks as 8-bit codes in the CPU tier (ALISE section 3.2, "KV Compression").

Each channel of a head's keys or values has a scale and a minimum over the tokens of a block, both bfloat16:

    minimum = the smallest number, rounded down        code   = round((x - minimum) / scale), in [0, 255]
    scale   = (largest - minimum) / 255, rounded up    x again = minimum + scale * code

The paper prints an integer zero point of round(-2^b / (max - min)); it must be round(-min / scale).

The codes cover the largest number of a channel, because the minimum is rounded down and the scale up. So the error of
a number is at most half its channel's scale, plus the rounding of its own type (bfloat16: 1/256 of it). The scale is at
most (largest - smallest + |smallest| / 128) / 255 * (1 + 1/128), and at least 2^-126. bfloat16 has the range of
float32, so no channel overflows. A constant channel of bfloat16 numbers is restored exactly, because its minimum is.
Products of a code and a scale are exact in float32, so all implementations return the same bits.

NaN, infinities and numbers from 2^126 on do not affect minimum and scale. They are restored as the largest number of
their channel, NaN and negative ones as its minimum. So are slots after the request's last token.
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64, c_void_p
from typing import Any, Protocol

import torch

from skipjoin.model.kv_cache import CODE_LEVELS, PagedKV, QuantizedKV
from skipjoin.model.ops.block_copy import runs_of
from skipjoin.model.ops.build import load_library
from skipjoin.model.transfer import send

# Numbers from here on count as infinite, so that differences of two are finite.
INFINITE = 2.0**126
# Minimum scale with a finite reciprocal.
MIN_SCALE = 2.0**-126
# Type numbers of block_quant.cpp.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Bytes of rows that are converted at a time. torch's operations make several float32 copies of them.
_AT_ONCE_BYTES = 16 << 20


class BlockQuantizer(Protocol):
    """Moves blocks between a device pool and a quantized pool, without checks: source[i] goes to target[i]."""

    def quantize(
        self, host: QuantizedKV, device: PagedKV, target: Sequence[int], source: Sequence[int], last: int
    ) -> None:
        """Quantize blocks to the CPU tier; the last has `last` tokens."""
        ...

    def dequantize(self, device: PagedKV, host: QuantizedKV, target: Sequence[int], source: Sequence[int]) -> None: ...


@functools.cache
def block_quantizer() -> BlockQuantizer:
    library = load_library()
    return TorchQuantizer() if library is None else CompiledQuantizer(library)


class CompiledQuantizer:
    """Compiled quantizer, without the GIL, with stores that bypass the caches."""

    def __init__(self, library: ctypes.CDLL) -> None:
        shape = [c_int64] * 4
        self._quantize = _declared(library.skipjoin_quantize_blocks, *shape, *[c_void_p] * 4, c_int64, c_int64)
        self._dequantize = _declared(library.skipjoin_dequantize_blocks, *shape, *[c_void_p] * 4, c_int64)

    def quantize(
        self, host: QuantizedKV, device: PagedKV, target: Sequence[int], source: Sequence[int], last: int
    ) -> None:
        # Named variables keep the arrays alive: the call reads them by address.
        to, rows = array("q", target), array("q", source)
        addresses = host.tensor.data_ptr(), device.tensor.data_ptr(), to.buffer_info()[0], rows.buffer_info()[0]
        self._quantize(_TYPES[device.tensor.dtype], *host.shape, *addresses, len(rows), last)

    def dequantize(self, device: PagedKV, host: QuantizedKV, target: Sequence[int], source: Sequence[int]) -> None:
        to, rows = array("q", target), array("q", source)
        addresses = device.tensor.data_ptr(), host.tensor.data_ptr(), to.buffer_info()[0], rows.buffer_info()[0]
        self._dequantize(_TYPES[device.tensor.dtype], *host.shape, *addresses, len(rows))


def _declared(call: Any, *arguments: type) -> Callable[..., None]:
    call.argtypes, call.restype = list(arguments), None
    declared: Callable[..., None] = call
    return declared


class StagedQuantizer(ABC):
    """Quantizer that converts blocks on their device and copies rows of several blocks to and from the CPU tier."""

    def quantize(
        self, host: QuantizedKV, device: PagedKV, target: Sequence[int], source: Sequence[int], last: int
    ) -> None:
        for at, end in _parts(host, len(source)):
            tokens = last if end == len(source) else host.shape[1]
            rows = self.to_rows(host, device, source[at:end], tokens)
            for first_to, first, count in runs_of(target[at:end], range(end - at)):
                host.tensor[first_to : first_to + count].copy_(rows[first : first + count], non_blocking=True)

    def dequantize(self, device: PagedKV, host: QuantizedKV, target: Sequence[int], source: Sequence[int]) -> None:
        for at, end in _parts(host, len(source)):
            rows = new_rows(host, device, end - at)
            for first, first_from, count in runs_of(range(end - at), source[at:end]):
                rows[first : first + count].copy_(host.tensor[first_from : first_from + count], non_blocking=True)
            self.from_rows(device, host, target[at:end], rows)

    @abstractmethod
    def to_rows(self, host: QuantizedKV, device: PagedKV, source: Sequence[int], last: int) -> torch.Tensor:
        """Return rows of blocks on the device; the last block has `last` tokens."""

    @abstractmethod
    def from_rows(self, device: PagedKV, host: QuantizedKV, target: Sequence[int], rows: torch.Tensor) -> None:
        """Write rows to blocks."""


def new_rows(host: QuantizedKV, device: PagedKV, count: int) -> torch.Tensor:
    """Return memory on the device for rows."""
    return torch.empty((count, host.block_bytes), dtype=torch.uint8, device=device.tensor.device)


def _parts(host: QuantizedKV, blocks: int) -> Iterator[tuple[int, int]]:
    size = max(1, _AT_ONCE_BYTES // host.block_bytes)
    for at in range(0, blocks, size):
        yield at, min(at + size, blocks)


class TorchQuantizer(StagedQuantizer):
    """Quantizer in torch operations: the reference and fallback."""

    def to_rows(self, host: QuantizedKV, device: PagedKV, source: Sequence[int], last: int) -> torch.Tensor:
        return quantized(device.head_view()[send(source, device.tensor.device)], last)

    def from_rows(self, device: PagedKV, host: QuantizedKV, target: Sequence[int], rows: torch.Tensor) -> None:
        blocks = device.head_view()
        blocks[send(target, blocks.device)] = dequantized(rows, host.shape, blocks.dtype)


def quantized(blocks: torch.Tensor, last: int) -> torch.Tensor:
    """Return rows [blocks, bytes] of KV blocks [blocks, heads, tokens, dim]; the last block has `last` tokens."""
    x = blocks.float()
    is_stale = torch.zeros(x.shape[:3], dtype=torch.bool, device=x.device)
    is_stale[-1, :, last:] = True
    is_out = is_stale[..., None] | ~(x.abs() < INFINITE)
    low, high = x.masked_fill(is_out, torch.inf).amin(2), x.masked_fill(is_out, -torch.inf).amax(2)
    has_any = low <= high
    low, high = _cut(low.where(has_any, 0.0), up=False), high.where(has_any, 0.0)
    # By a tensor, because on CUDA torch multiplies by the reciprocal of a number, which rounds differently.
    scale = _cut((high - low) / high.new_full((), CODE_LEVELS), up=True).clamp(min=MIN_SCALE)
    low, high, inverse = (part[:, :, None] for part in (low, high, scale.reciprocal()))
    inside = torch.minimum(x, high).where(x > low, low)  # NaN becomes the minimum
    codes = ((inside - low) * inverse).round().masked_fill(is_stale[..., None], 0).to(torch.uint8)
    scales = torch.stack((scale, low[:, :, 0]), 2).to(torch.bfloat16)
    return torch.cat((scales.flatten(1).view(torch.uint8), codes.flatten(1)), 1)


def dequantized(rows: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return KV blocks [blocks, heads, tokens, dim] of rows; `shape` is (heads, tokens, dim)."""
    heads, tokens, dim = shape
    codes_at = QuantizedKV.scale_bytes(shape)
    scales = rows[:, :codes_at].contiguous().view(torch.bfloat16).view(-1, heads, 2, 1, dim).float()
    codes = rows[:, codes_at:].view(-1, heads, tokens, dim).float()
    most = torch.finfo(dtype).max
    return (scales[:, :, 1] + scales[:, :, 0] * codes).clamp(-most, most).to(dtype)


def _cut(x: torch.Tensor, *, up: bool) -> torch.Tensor:
    """Return the nearest bfloat16 not above finite `x`, or not below it if `up`, as float32."""
    bits = x.contiguous().view(torch.int32)
    cut = bits & -0x10000
    # Cutting rounds towards zero, which is right for one sign only.
    is_wrong = (bits != cut) & ((x < 0) != up)
    return (cut + is_wrong.int() * 0x10000).view(torch.float32)
