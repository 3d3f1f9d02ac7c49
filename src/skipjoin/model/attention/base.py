"""The interface of attention back ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.parallel import Shard


class AttentionBackend(Protocol):
    """Causal attention of a packed batch over the paged cache.

    Every segment's new tokens attend to all earlier tokens of their sequence, in the blocks of its table, and to the
    new tokens up to themselves. Cache slots beyond a sequence's length may hold any value, NaN included, and must not
    affect the result. Implementations use the strides of the cache and of their arguments.
    """

    name: str

    def tune(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int, shard: Shard
    ) -> None:
        """Measure the fastest kernel sizes for a rank's share of this model, where they are not known. Called before
        the first step and before the cache is allocated; may take seconds, and memory that is freed."""
        ...

    def versions(
        self, config: ModelConfig, block_size: int, seqs: int, positions: int, shard: Shard
    ) -> Sequence[tuple[tuple[int, ...], int]]:
        """Batches, (lengths of the segments, blocks of the tables), that together need every version of the kernels
        that a batch of up to `seqs` segments of sequences of up to `positions` tokens can need; empty where nothing is
        compiled. The same for all ranks of a model."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: PagedKV,
        batch: PackedBatch,
        *,
        layer: int,
        scale: float,
        window: int = 0,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys if `cos_sin` is given, write the new keys and values into their slots, then attend.

        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim], any strides with head_dim innermost.
        heads is a multiple of kv_heads: query head h reads key-value head h * kv_heads // heads.
        scale multiplies the scores. window: number of latest tokens attended to, the token itself included; 0: all.
        cos_sin: float32 [positions, rotary_dim], cosines of the rotary_dim / 2 pairs, then their sines. If given, the
        first rotary_dim values of each query and key are rotated by their token's position first, value i paired with
        value i + rotary_dim / 2; `query` and `key` may be changed.
        Returns [T, heads * head_dim], contiguous, in the type of `query`.
        """
        ...
