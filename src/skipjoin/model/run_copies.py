"""Copies of many runs of rows between a GPU and page-locked memory, by one call of the driver from CUDA 12.8 on.

One call of torch for each would keep the thread from launching anything else.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_int, c_size_t, c_void_p
from typing import Any

import torch

from skipjoin.model.ops.build import declare

_log = logging.getLogger(__name__)

# First row of the target, first row of the source, and rows.
Run = tuple[int, int, int]
# Target addresses, source addresses, sizes in bytes, and the handle of a stream; returns CUDA's error code.
BatchCall = Callable[[Sequence[int], Sequence[int], Sequence[int], int], int]

_LIBRARY = "libcuda.so.1"
# Functions of the driver, the newest first, and whether they return the index of a copy that failed.
_FUNCTIONS = (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True))
# Reads a source when the stream reaches the copy, as other copies do.
_IN_STREAM_ORDER = 1
# Handle of the default stream, which these functions refuse.
_DEFAULT_STREAM = 0


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`; a place has a type and a number, which are ignored except for managed memory."""

    _fields_ = [("order", c_int), ("source", c_int * 2), ("target", c_int * 2), ("flags", ctypes.c_uint)]


def batch_call(library: Any) -> BatchCall | None:
    name, has_index = next((found for found in _FUNCTIONS if hasattr(library, found[0])), ("", False))
    if not name:
        return None
    arguments = *[c_void_p] * 3, c_size_t, c_void_p, c_void_p, c_size_t, *[c_void_p] * has_index, c_void_p
    function = declare(getattr(library, name), *arguments, returns=c_int)
    attributes, first, failed = _Attributes(order=_IN_STREAM_ORDER), c_size_t(0), c_size_t(0)
    index = (ctypes.addressof(failed),) if has_index else ()

    def call(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> int:
        # Named variables keep the arrays alive: the driver reads them by address.
        arrays = [array("Q", numbers) for numbers in (targets, sources, sizes)]
        addresses = [numbers.buffer_info()[0] for numbers in arrays]
        shared = ctypes.addressof(attributes), ctypes.addressof(first), 1
        code: int = function(*addresses, len(sizes), *shared, *index, stream)
        return code

    return call


class RunBatch:
    def __init__(self, call: BatchCall, device: torch.device) -> None:
        self._call: BatchCall | None = call
        self._device = device
        self._aside = torch.cuda.Stream(device)

    def copies(self, target: torch.Tensor, source: torch.Tensor, runs: Sequence[Run]) -> bool:
        """Queue the copies, and return whether that succeeded. Both tensors have contiguous rows of equal size."""
        if self._call is None:
            return False
        row = target.stride(0) * target.element_size()
        to, begin = target.data_ptr(), source.data_ptr()
        lists = (
            [to + first * row for first, _, _ in runs],
            [begin + first * row for _, first, _ in runs],
            [count * row for _, _, count in runs],
        )
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream == _DEFAULT_STREAM:
            self._aside.wait_stream(stream)
            code = self._call(*lists, self._aside.cuda_stream)
            stream.wait_stream(self._aside)
        else:
            code = self._call(*lists, stream.cuda_stream)
        if code:
            _log.warning("the driver refuses copies in batches (error %d): blocks are copied one by one", code)
            self._call = None
        return not code


@functools.cache
def run_batch(device: torch.device) -> RunBatch | None:
    call = None
    with suppress(OSError, ValueError):  # no such library, or another calling convention
        call = batch_call(ctypes.CDLL(_LIBRARY))
    if call is None:
        return None
    batch = RunBatch(call, device)
    rows = torch.arange(1 << 10, dtype=torch.int32).view(4, -1).pin_memory()
    here, back = torch.zeros_like(rows, device=device), torch.zeros_like(rows).pin_memory()
    has_run = batch.copies(here, rows, ((0, 2, 2), (3, 0, 1))) and batch.copies(back, here, ((2, 0, 2), (0, 3, 1)))
    torch.cuda.current_stream(device).synchronize()
    if has_run and torch.equal(back[[0, 2, 3]], rows[[0, 2, 3]]) and not back[1].any():
        return batch
    if has_run:
        _log.warning("the driver copies wrongly in batches: blocks are copied one by one")
    return None


def copy_runs(target: torch.Tensor, source: torch.Tensor, runs: Sequence[Run]) -> None:
    if len(runs) > 1 and target.is_cuda != source.is_cuda:
        here, there = (target, source) if target.is_cuda else (source, target)
        batch = run_batch(here.device) if there.is_pinned() else None
        if batch is not None and batch.copies(target, source, runs):
            return
    for first_to, first, count in runs:
        target[first_to : first_to + count].copy_(source[first : first + count], non_blocking=True)
