"""The tensors behind the ledger's block numbers: one pool on the device, one on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from skipjoin.core.step import Direction, Move
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV


class KVStore:
    """KV blocks on both tiers, in the same block-major layout, so that a block moves as one contiguous copy.

    device_blocks, host_blocks: pool sizes; no host pool is allocated for 0. block_size: tokens per block.
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
    ) -> None:
        self.device = PagedKV(device_blocks, block_size, config, dtype, device)
        self.host = None
        if host_blocks:
            self.host = PagedKV(host_blocks, block_size, config, dtype, "cpu", pin=device.type == "cuda")

    def apply(self, moves: Sequence[Move]) -> None:
        """Copy the moves' blocks. Moves of one plan touch distinct blocks, except that a move in may land where a
        move out has just left: all moves out go first."""
        for direction in (Direction.OUT, Direction.IN):
            chosen = [move for move in moves if move.direction is direction]
            if chosen:
                self._copy(direction, chosen)

    def _copy(self, direction: Direction, moves: Sequence[Move]) -> None:
        if self.host is None:
            raise ValueError("a plan moves KV blocks, but there is no host pool")
        device, host = self.device.block_view(), self.host.block_view()
        source, target = (device, host) if direction is Direction.OUT else (host, device)
        rows = torch.tensor([block for move in moves for block in move.source], device=source.device)
        to = torch.tensor([block for move in moves for block in move.target], device=target.device)
        target.index_copy_(0, to, source.index_select(0, rows).to(target.device))
