from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from skipjoin.core.step import Direction
from skipjoin.model.kv_cache import PagedKV, SwapPool
from skipjoin.model.ops.block_copy import MIN_RUN_BYTES, block_copy, runs_of
from skipjoin.model.ops.block_quant import BlockQuantizer, TorchQuantizer, block_quantizer
from skipjoin.model.transfer import send

_log = logging.getLogger(__name__)

# Arguments: target and source pool as rows, then target and source row numbers. See `model.kernels.block_copy`.
BlocksKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
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
    """Return the engine of these pools. It compiles its kernels, so that no step waits for them."""
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


class StreamedCopies:
    """Copies between a GPU and CPU memory: a run of blocks at a time, or many short runs by one kernel."""

    def __init__(self, device: PagedKV, cpu: PagedKV) -> None:
        self._device, self._cpu = device, cpu
        self._kernel = _blocks_kernel() if cpu.tensor.is_pinned() else None
        if device.block_bytes < MIN_RUN_BYTES:
            self._launch(cpu.block_view(), device.block_view(), Pairs((0,), (0,)))  # both blocks are zeros

    def copy(self, direction: Direction, pairs: Pairs, last: int) -> None:
        source, target = (pool.block_view() for pool in _pools(direction, self._device, self._cpu))
        runs = list(runs_of(pairs.target, pairs.source))
        row_bytes = source.shape[1] * source.element_size()
        are_short = row_bytes * len(pairs.source) < MIN_RUN_BYTES * len(runs)
        if len(runs) > _MAX_SHORT_RUNS and are_short and self._launch(target, source, pairs):
            return
        for first_to, first, count in runs:
            target[first_to : first_to + count].copy_(source[first : first + count], non_blocking=True)

    def _launch(self, target: torch.Tensor, source: torch.Tensor, pairs: Pairs) -> bool:
        if self._kernel is None:
            return False
        try:
            ids = send((pairs.target, pairs.source), self._device.tensor.device, torch.int64)
            self._kernel(target, source, ids[0], ids[1])
        except Exception as error:  # the compiler or the driver may not support the kernel
            _log.warning("the block copy kernel fails, so KV blocks are copied one by one, which is slower: %s", error)
            self._kernel = None
            return False
        return True


class QuantizedCopies:
    """Converts KV on swap-out and back on swap-in (ALISE section 3.2)."""

    def __init__(self, device: PagedKV, cpu: SwapPool) -> None:
        self._device, self._cpu = device, cpu
        if not device.tensor.is_cuda:
            self._quantizer = block_quantizer(cpu.format)
            return
        has_kernels = cpu.format.has_kernels and cpu.tensor.is_pinned()
        self._quantizer = (_quantizer_kernels() if has_kernels else None) or TorchQuantizer()
        # Both blocks are zeros.
        self.copy(Direction.OUT, Pairs((0,), (0,)), cpu.shape[1])
        self.copy(Direction.IN, Pairs((0,), (0,)), cpu.shape[1])

    def copy(self, direction: Direction, pairs: Pairs, last: int) -> None:
        device, cpu = self._device, self._cpu
        if not pairs.source:
            return
        if direction is Direction.OUT:
            self._run(lambda by: by.quantize(cpu, device, pairs.target, pairs.source, last))
        else:
            self._run(lambda by: by.dequantize(device, cpu, pairs.target, pairs.source))

    def _run(self, work: Callable[[BlockQuantizer], None]) -> None:
        try:
            work(self._quantizer)
        except Exception as error:  # the compiler or the driver may not support the kernels
            if isinstance(self._quantizer, TorchQuantizer):
                raise
            _log.warning("the kernels that quantize KV fail, so torch's operations do it, slower: %s", error)
            self._quantizer = TorchQuantizer()
            work(self._quantizer)


def _pools(direction: Direction, device: PagedKV, cpu: PagedKV) -> tuple[PagedKV, PagedKV]:
    return cpu if direction is Direction.IN else device, cpu if direction is Direction.OUT else device


def _blocks_kernel() -> BlocksKernel | None:
    try:
        from skipjoin.model.kernels.block_copy import copy_blocks  # noqa: PLC0415 (an optional back end)
    except ImportError:
        return None
    return copy_blocks


def _quantizer_kernels() -> BlockQuantizer | None:
    try:
        from skipjoin.model.kernels.block_quant import TritonQuantizer  # noqa: PLC0415 (an optional back end)
    except ImportError:
        return None
    return TritonQuantizer()
