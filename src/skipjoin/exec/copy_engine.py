from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch

from skipjoin.core.step import Direction
from skipjoin.model.kv_cache import PagedKV, SwapPool
from skipjoin.model.ops.block_copy import MIN_RUN_BYTES, block_copy, runs_of
from skipjoin.model.ops.block_quant import BlockQuantizer, TorchQuantizer, block_quantizer
from skipjoin.model.run_copies import copy_runs, run_batch
from skipjoin.model.transfer import send

_log = logging.getLogger(__name__)

# The kernel copies more short runs than this. Its launch takes as long as queueing this many copies.
_MAX_SHORT_RUNS = 8


class Pairs(NamedTuple):
    """Blocks of a move: source[i] goes to target[i]."""

    source: Sequence[int]
    target: Sequence[int]


class CopyEngine(Protocol):
    """Copies whole blocks between a device pool and a CPU pool in the format of the latter."""

    def copy(self, direction: Direction, pairs: Pairs, last: int) -> None:
        """Copy without the GIL, or on CUDA queue it on the current stream. The last block has `last` tokens."""
        ...


def copy_engine(device: PagedKV, cpu: PagedKV | SwapPool) -> CopyEngine:
    """Return the engine of these pools, with its kernels compiled, so that no step waits for them."""
    if isinstance(cpu, SwapPool):
        return QuantizedCopies(device, cpu)
    return StreamedCopies(device, cpu) if device.tensor.is_cuda else HostCopies(device, cpu)


class HostCopies:
    def __init__(self, device: PagedKV, cpu: PagedKV) -> None:
        self._device, self._cpu = device, cpu
        self._copy_blocks = block_copy()

    def copy(self, direction: Direction, pairs: Pairs, last: int) -> None:
        source, target = _pools(direction, self._device, self._cpu)
        addresses = target.tensor.data_ptr(), source.tensor.data_ptr()
        self._copy_blocks(*addresses, source.block_bytes, pairs.target, pairs.source)


class OptionalKernel:
    """Triton kernel of a module, which is dropped if it fails: the compiler or the driver may not support it."""

    def __init__(self, module: str, name: str, slower: str, *, is_usable: bool = True) -> None:
        self._kernel: Any = None
        self._slower = slower
        if is_usable:
            with suppress(ImportError):
                self._kernel = getattr(import_module(f"skipjoin.model.kernels.{module}"), name)

    def runs(self, work: Callable[[Any], object]) -> bool:
        if self._kernel is None:
            return False
        try:
            work(self._kernel)
        except Exception as error:
            _log.warning("a kernel that copies KV fails, so %s, which is slower: %s", self._slower, error)
            self._kernel = None
        return self._kernel is not None


class StreamedCopies:
    """Copies between a GPU and CPU memory, by copy engines or, for many short runs of blocks, one kernel."""

    def __init__(self, device: PagedKV, cpu: PagedKV) -> None:
        self._device, self._cpu = device, cpu
        is_usable = cpu.tensor.is_pinned()
        if is_usable:
            run_batch(device.tensor.device)  # tested now rather than in the first step that needs it
        self._kernel = OptionalKernel("block_copy", "copy_blocks", "blocks are copied one by one", is_usable=is_usable)
        if device.block_bytes < MIN_RUN_BYTES:
            self._launch(cpu.block_view(), device.block_view(), Pairs((0,), (0,)))  # both blocks are zeros

    def copy(self, direction: Direction, pairs: Pairs, last: int) -> None:
        source, target = (pool.block_view() for pool in _pools(direction, self._device, self._cpu))
        runs = list(runs_of(pairs.target, pairs.source))
        row_bytes = source.shape[1] * source.element_size()
        are_short = row_bytes * len(pairs.source) < MIN_RUN_BYTES * len(runs)
        if len(runs) > _MAX_SHORT_RUNS and are_short and self._launch(target, source, pairs):
            return
        copy_runs(target, source, runs)

    def _launch(self, target: torch.Tensor, source: torch.Tensor, pairs: Pairs) -> bool:
        ids, device = (pairs.target, pairs.source), self._device.tensor.device
        return self._kernel.runs(lambda copy: copy(target, source, *send(ids, device, torch.int64)))


class QuantizedCopies:
    """Converts KV on swap-out and back on swap-in (ALISE section 3.2)."""

    def __init__(self, device: PagedKV, cpu: SwapPool) -> None:
        self._device, self._cpu = device, cpu
        is_cuda = device.tensor.is_cuda
        self._quantizer = TorchQuantizer() if is_cuda else block_quantizer(cpu.format)
        is_usable = is_cuda and cpu.format.has_kernels and cpu.tensor.is_pinned()
        self._kernels = OptionalKernel("block_quant", "TritonQuantizer", "torch quantizes it", is_usable=is_usable)
        if is_cuda:  # both blocks are zeros
            run_batch(device.tensor.device)
            self.copy(Direction.OUT, Pairs((0,), (0,)), cpu.shape[1])
            self.copy(Direction.IN, Pairs((0,), (0,)), cpu.shape[1])

    def copy(self, direction: Direction, pairs: Pairs, last: int) -> None:
        device, cpu = self._device, self._cpu
        if not pairs.source:
            return

        def convert(by: BlockQuantizer) -> None:
            if direction is Direction.OUT:
                by.quantize(cpu, device, pairs.target, pairs.source, last)
            else:
                by.dequantize(device, cpu, pairs.target, pairs.source)

        if not self._kernels.runs(lambda made: convert(made())):
            convert(self._quantizer)


def _pools(direction: Direction, device: PagedKV, cpu: PagedKV) -> tuple[PagedKV, PagedKV]:
    return cpu if direction is Direction.IN else device, cpu if direction is Direction.OUT else device
