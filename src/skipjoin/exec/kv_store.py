from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from skipjoin.core.step import Direction, Move
from skipjoin.exec.quantized_copies import QuantizedCopies
from skipjoin.exec.span_copies import SpanCopies
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV, QuantizedKV
from skipjoin.model.ops.block_copy import MIN_RUN_BYTES, block_copy, runs_of
from skipjoin.model.parallel import WHOLE, Shard
from skipjoin.model.transfer import send

_log = logging.getLogger(__name__)

# Arguments: target and source pool as rows, then target and source row numbers. See `model.kernels.block_copy`.
BlocksKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
# The kernel copies more short runs than this. Its launch takes as long as queueing this many copies.
_MAX_SHORT_RUNS = 8


class KVStore:
    """KV blocks of both tiers in the same block-major layout, so that a block moves as one contiguous copy.

    Args:
        cpu_blocks: 0 allocates no CPU pool.
        swap_dtype: auto, or int8 for 8 bits per number in the CPU tier.
        link_bytes_per_s: Limit of the bandwidth between the tiers in each direction; None for none.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        device_blocks: int,
        cpu_blocks: int,
        block_size: int,
        shard: Shard = WHOLE,
        swap_dtype: str = "auto",
        link_bytes_per_s: float | None = None,
    ) -> None:
        self.swap_dtype = swap_dtype
        self.link_bytes_per_s = link_bytes_per_s
        self._kernel: BlocksKernel | None = None
        self._quantized: QuantizedCopies | None = None
        self._spans: SpanCopies | None = None
        self.device = PagedKV(device_blocks, block_size, config, dtype, device, shard=shard)
        self.cpu: PagedKV | QuantizedKV | None = None
        is_cuda = device.type == "cuda"
        if cpu_blocks and swap_dtype == "int8":
            self.cpu = QuantizedKV(cpu_blocks, block_size, config, pin=is_cuda, shard=shard)
            self._quantized = QuantizedCopies(self.device, self.cpu)
        elif cpu_blocks:
            self.cpu = PagedKV(cpu_blocks, block_size, config, dtype, "cpu", pin=is_cuda, shard=shard)
            self._spans = SpanCopies(self.device, self.cpu)
            if device.type == "cpu":
                # Requested here because it may have to be compiled first.
                self._copy_blocks = block_copy()
            elif is_cuda and self.cpu.tensor.is_pinned():
                self._kernel = _blocks_kernel()
                if self.device.block_bytes < MIN_RUN_BYTES:
                    # Compiled here rather than in the first step that needs it. Both blocks are zeros.
                    self._launch(self.cpu.block_view(), self.device.block_view(), (0,), (0,))

    def link_seconds(self, move: Move) -> float:
        """Return the minimum seconds of a move between the tiers."""
        if self.link_bytes_per_s is None or self.cpu is None:
            return 0.0
        return move.blocks(self.device.block_size) * self.cpu.block_bytes / self.link_bytes_per_s

    def copy(self, move: Move) -> None:
        """Execute a move without the GIL, or on CUDA queue it on the current stream."""
        if self.cpu is None:
            raise ValueError("a plan moves KV blocks, but there is no CPU pool")
        source = self.cpu if move.direction is Direction.IN else self.device
        target = self.cpu if move.direction is Direction.OUT else self.device
        if len(move.source) != len(move.target):
            raise ValueError(f"a move has {len(move.source)} blocks in source and {len(move.target)} in target")
        if not move.spans and -(-move.tokens // self.device.block_size) != len(move.source):
            raise ValueError(f"{move.tokens} tokens do not end in the last of {len(move.source)} blocks")
        _check("source", move.source, source)
        _check("target", move.target, target)
        if move.spans:
            self._copy_spans(target, source, move)
        elif self._quantized is not None:
            self._quantized.copy(move)
        elif self.device.tensor.is_cuda:
            self._queue(target.block_view(), source.block_view(), move)
        else:
            addresses = target.tensor.data_ptr(), source.tensor.data_ptr()
            self._copy_blocks(*addresses, source.block_bytes, move.target, move.source)

    def _copy_spans(self, target: PagedKV | QuantizedKV, source: PagedKV | QuantizedKV, move: Move) -> None:
        if self._spans is None or isinstance(target, QuantizedKV) or isinstance(source, QuantizedKV):
            raise ValueError("parts of a block do not move where the host has 8 bits for each number")
        self._spans.copy(target, source, move)

    def _queue(self, to: torch.Tensor, rows: torch.Tensor, move: Move) -> None:
        runs = list(runs_of(move.target, move.source))
        row_bytes = rows.shape[1] * rows.element_size()
        are_short = row_bytes * len(move.source) < MIN_RUN_BYTES * len(runs)
        if len(runs) > _MAX_SHORT_RUNS and are_short and self._launch(to, rows, move.target, move.source):
            return
        for first_to, first, count in runs:
            to[first_to : first_to + count].copy_(rows[first : first + count], non_blocking=True)

    def _launch(self, to: torch.Tensor, rows: torch.Tensor, targets: Sequence[int], sources: Sequence[int]) -> bool:
        if self._kernel is None:
            return False
        try:
            ids = send((targets, sources), self.device.tensor.device, torch.int64)
            self._kernel(to, rows, ids[0], ids[1])
        except Exception as error:  # the compiler or the driver may not support the kernel
            _log.warning("the block copy kernel fails, so KV blocks are copied one by one, which is slower: %s", error)
            self._kernel = None
            return False
        return True


def _blocks_kernel() -> BlocksKernel | None:
    try:
        from skipjoin.model.kernels.block_copy import copy_blocks  # noqa: PLC0415 (an optional back end)
    except ImportError:
        return None
    return copy_blocks


def _check(side: str, blocks: Sequence[int], pool: PagedKV | QuantizedKV) -> None:
    """Check blocks, because copies address memory directly."""
    if blocks and not 0 <= min(blocks) <= max(blocks) < pool.num_blocks:
        wrong = next(block for block in blocks if not 0 <= block < pool.num_blocks)
        raise ValueError(f"{side} of a move must lie in [0, {pool.num_blocks}), got block {wrong}")
