"""What an attention back end must do."""

from __future__ import annotations

from typing import Protocol

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.parallel import Shard


class AttentionBackend(Protocol):
    """Causal attention of a packed batch over the paged cache.

    Every segment's new tokens attend to all earlier tokens of their sequence, which lie in the blocks of its
    table, and to the new ones up to themselves. Cache slots beyond a sequence's length hold anything, NaN
    included, and must not matter. Implementations go by strides, both of the cache and of their arguments.
    """

    name: str

    def tune(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int, shard: Shard
    ) -> None:
        """Find out what runs fastest for a rank's part of this model, where that is not known. Called before the first
        step and before the cache is made; may take seconds and memory that is given back."""
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
        """Rotate queries and keys where told, write the new keys and values into their slots, then attend.

        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim], any strides with head_dim innermost.
        heads is a multiple of kv_heads: query head h reads key-value head h * kv_heads // heads.
        scale multiplies the scores. window: how many latest tokens are seen, own included; 0: all.
        cos_sin: float32 [positions, rotary_dim], cosines of the rotary_dim / 2 pairs, then their sines. Where given,
        the first rotary_dim values of each query and key are rotated by their token's position first, halves against
        each other; `query` and `key` may be changed.
        Returns [T, heads * head_dim], contiguous, in the type of `query`.
        """
        ...
