from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.parallel import Shard


class Softmax(NamedTuple):
    scale: float
    cap: float = 0.0
    sinks: torch.Tensor | None = None


class HeadWeights(NamedTuple):
    """Root mean square norms of heads' queries and keys: weights [head_dim], to which `offset` is added."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    offset: float

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._normalized(query, self.query), self._normalized(key, self.key)

    def _normalized(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        factor = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * factor * (weight.float() + self.offset)).to(x.dtype)


class Heads(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Call(NamedTuple):
    layer: int
    softmax: Softmax
    window: int
    cos_sin: torch.Tensor | None
    norms: HeadWeights | None


class AttentionBackend(ABC):
    """Causal attention over the paged cache. Slots beyond a sequence's length may hold any value, even NaN."""

    name: str

    def tune(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int, shard: Shard
    ) -> None:
        """Measure unknown kernel sizes, before the cache is allocated; may take seconds."""
        return

    def versions(
        self, config: ModelConfig, block_size: int, seqs: int, positions: int, shard: Shard
    ) -> Sequence[tuple[tuple[int, ...], int]]:
        """Return batches, (lengths, blocks of tables), that need every kernel version within the limits."""
        return ()

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
        cap: float = 0.0,
        sinks: torch.Tensor | None = None,
        cos_sin: torch.Tensor | None = None,
        norms: HeadWeights | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys in place if `cos_sin` is given, write the new KV into its slots, then attend.

        Query head h reads KV head h * kv_heads // heads. Returns [T, heads * head_dim], contiguous.

        Args:
            query: Shape [T, heads, head_dim], head_dim innermost; `key` and `value` likewise, with kv_heads.
            window: Number of latest tokens attended to, including the token itself; 0 for all.
            cap: Scores s become cap * tanh(s / cap); 0 for none.
            sinks: float32 [heads], a score per head that takes part in the softmax without a value.
            cos_sin: float32 [positions, rotary_dim], cosines of the pairs (i, i + rotary_dim / 2), then their sines.
            norms: Norms before the rotation, if queries and keys are not normalized yet.
        """
        call = Call(layer, Softmax(scale, cap, sinks), window, cos_sin, norms)
        return self.run(Heads(query, key, value), kv, batch, call)

    @abstractmethod
    def run(self, heads: Heads, kv: PagedKV, batch: PackedBatch, call: Call) -> torch.Tensor: ...


@dataclass(slots=True)
class LayerInputs:
    batch: PackedBatch
    kv: PagedKV
    attention: AttentionBackend
