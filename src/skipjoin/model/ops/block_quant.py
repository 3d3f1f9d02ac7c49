from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from ctypes import c_int64, c_void_p

import torch

from skipjoin.kv_format import SwapFormat
from skipjoin.model.kv_cache import PagedKV, SwapPool
from skipjoin.model.ops.block_copy import runs_of
from skipjoin.model.ops.build import declare, load_library
from skipjoin.model.run_copies import copy_runs
from skipjoin.model.transfer import send

# Type numbers of block_quant.cpp.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Bytes of rows that are converted at a time. torch's operations make several float32 copies of them.
_AT_ONCE_BYTES = 16 << 20


@functools.cache
def block_quantizer(of: SwapFormat) -> BlockQuantizer:
    library = load_library() if of.has_kernels else None
    return TorchQuantizer() if library is None else CompiledQuantizer(library)


class CompiledQuantizer:
    def __init__(self, library: ctypes.CDLL) -> None:
        shape = [c_int64] * 4
        self._quantize = declare(library.skipjoin_quantize_blocks, *shape, *[c_void_p] * 4, c_int64, c_int64)
        self._dequantize = declare(library.skipjoin_dequantize_blocks, *shape, *[c_void_p] * 4, c_int64)

    def quantize(
        self, host: SwapPool, device: PagedKV, target: Sequence[int], source: Sequence[int], last: int
    ) -> None:
        # Named variables keep the arrays alive: the call reads them by address.
        to, rows = array("q", target), array("q", source)
        addresses = host.tensor.data_ptr(), device.tensor.data_ptr(), to.buffer_info()[0], rows.buffer_info()[0]
        self._quantize(_TYPES[device.tensor.dtype], *host.shape, *addresses, len(rows), last)

    def dequantize(self, device: PagedKV, host: SwapPool, target: Sequence[int], source: Sequence[int]) -> None:
        to, rows = array("q", target), array("q", source)
        addresses = device.tensor.data_ptr(), host.tensor.data_ptr(), to.buffer_info()[0], rows.buffer_info()[0]
        self._dequantize(_TYPES[device.tensor.dtype], *host.shape, *addresses, len(rows))


class StagedQuantizer(ABC):
    def quantize(
        self, host: SwapPool, device: PagedKV, target: Sequence[int], source: Sequence[int], last: int
    ) -> None:
        for at, end in _parts(host, len(source)):
            tokens = last if end == len(source) else host.shape[1]
            rows = self.to_rows(host, device, source[at:end], tokens)
            copy_runs(host.tensor, rows, list(runs_of(target[at:end], range(end - at))))

    def dequantize(self, device: PagedKV, host: SwapPool, target: Sequence[int], source: Sequence[int]) -> None:
        for at, end in _parts(host, len(source)):
            rows = new_rows(host, device, end - at)
            copy_runs(rows, host.tensor, list(runs_of(range(end - at), source[at:end])))
            self.from_rows(device, host, target[at:end], rows)

    @abstractmethod
    def to_rows(self, host: SwapPool, device: PagedKV, source: Sequence[int], last: int) -> torch.Tensor: ...

    @abstractmethod
    def from_rows(self, device: PagedKV, host: SwapPool, target: Sequence[int], rows: torch.Tensor) -> None: ...


def new_rows(host: SwapPool, device: PagedKV, count: int) -> torch.Tensor:
    return torch.empty((count, host.block_bytes), dtype=torch.uint8, device=device.tensor.device)


def _parts(host: SwapPool, blocks: int) -> Iterator[tuple[int, int]]:
    size = max(1, _AT_ONCE_BYTES // host.block_bytes)
    for at in range(0, blocks, size):
        yield at, min(at + size, blocks)


class TorchQuantizer(StagedQuantizer):
    def to_rows(self, host: SwapPool, device: PagedKV, source: Sequence[int], last: int) -> torch.Tensor:
        return host.format.quantize(device.head_view()[send(source, device.tensor.device)], last)

    def from_rows(self, device: PagedKV, host: SwapPool, target: Sequence[int], rows: torch.Tensor) -> None:
        blocks = device.head_view()
        blocks[send(target, blocks.device)] = host.format.dequantize(rows, host.shape, blocks.dtype)


BlockQuantizer = StagedQuantizer | CompiledQuantizer
