"""Interface of attention back ends."""

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

    New tokens attend to all earlier tokens of their sequence, in the blocks of its table, and to the new tokens up to
    themselves. Cache slots beyond a sequence's length may hold any value, including NaN, and must not affect the
    result. Implementations use the strides of the cache and of their arguments.
    """

    name: str

    def tune(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int, shard: Shard
    ) -> None:
        """Measure the fastest kernel sizes for a rank's shard of this model, if they are not known.

        Called before the first step and before the cache is allocated. May take seconds, and memory that is freed.
        """
        ...

    def versions(
        self, config: ModelConfig, block_size: int, seqs: int, positions: int, shard: Shard
    ) -> Sequence[tuple[tuple[int, ...], int]]:
        """Return batches that together need every kernel version that a batch within the limits can need.

        A batch is (lengths of the segments, blocks of the tables). All ranks of a model get the same batches, and none
        if nothing is compiled.

        Args:
            seqs: Maximum number of segments.
            positions: Maximum number of tokens of a sequence.
        """
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
        """Rotate queries and keys if `cos_sin` is given, write the new KV into its slots, then attend.

        Query head h reads KV head h * kv_heads // heads; heads is a multiple of kv_heads. `query` and `key` may be
        changed if they are rotated.

        Args:
            query: Shape [T, heads, head_dim], any strides with head_dim innermost.
            key: Shape [T, kv_heads, head_dim], likewise.
            value: Shape [T, kv_heads, head_dim], likewise.
            scale: Multiplies the scores.
            window: Number of latest tokens attended to, including the token itself; 0 for all.
            cos_sin: float32 [positions, rotary_dim], cosines of the rotary_dim / 2 pairs, then their sines. The first
                rotary_dim values of each query and key are rotated by their token's position, value i paired with value
                i + rotary_dim / 2.

        Returns:
            Shape [T, heads * head_dim], contiguous, in the type of `query`.
        """
        ...
