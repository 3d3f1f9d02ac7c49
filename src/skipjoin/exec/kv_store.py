"""The tensors behind the ledger's block numbers: one pool on the device, one on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skipjoin.core.step import Direction, Move
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.block_copy import block_copy, runs_of
from skipjoin.model.parallel import WHOLE, Shard


class KVStore:
    """KV blocks on both tiers, in the same block-major layout, so that a block moves as one contiguous copy.

    device_blocks, host_blocks: pool sizes; no host pool is allocated for 0. block_size: tokens per block. shard: the
    rank whose layers and heads it holds; block numbers are the same on all ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        device_blocks: int,
        host_blocks: int,
        block_size: int,
        shard: Shard = WHOLE,
    ) -> None:
        self.device = PagedKV(device_blocks, block_size, config, dtype, device, shard=shard)
        self.host = None
        if host_blocks:
            is_cuda = device.type == "cuda"
            self.host = PagedKV(host_blocks, block_size, config, dtype, "cpu", pin=is_cuda, shard=shard)
            if device.type == "cpu":
                # Asked for here, since it may have to be compiled first.
                self._copy_blocks = block_copy()

    def copy(self, move: Move) -> None:
        """Copy the blocks of a move; runs of blocks that follow each other on both tiers are one copy.

        On a CPU the calling thread copies, alone and without Python's lock, and returns when all is there. On CUDA
        the copies are queued on the current stream. Raises ValueError for blocks that the pools do not have.
        """
        if self.host is None:
            raise ValueError("a plan moves KV blocks, but there is no host pool")
        source, target = (self.device, self.host) if move.direction is Direction.OUT else (self.host, self.device)
        if len(move.source) != len(move.target):
            raise ValueError(f"a move has {len(move.source)} blocks in source and {len(move.target)} in target")
        _check("source", move.source, source)
        _check("target", move.target, target)
        if self.device.tensor.is_cuda:
            to, rows = target.block_view(), source.block_view()
            for first_to, first, count in runs_of(move.target, move.source):
                to[first_to : first_to + count].copy_(rows[first : first + count], non_blocking=True)
        else:
            addresses = target.tensor.data_ptr(), source.tensor.data_ptr()
            self._copy_blocks(*addresses, source.block_bytes, move.target, move.source)


def _check(side: str, blocks: Sequence[int], pool: PagedKV) -> None:
    """Raise ValueError unless the pool has all the blocks: copies go by address."""
    if blocks and not 0 <= min(blocks) <= max(blocks) < pool.num_blocks:
        wrong = next(block for block in blocks if not 0 <= block < pool.num_blocks)
        raise ValueError(f"{side} of a move must lie in [0, {pool.num_blocks}), got block {wrong}")
