from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import triton

from skipjoin.kv_format import CacheFormat
from skipjoin.model.attention.base import AttentionBackend, Call, Heads, Softmax
from skipjoin.model.attention.check import agrees
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.kernels.choices import Shape, decode_choice, distinct_batches, prefill_choice, tune_attention
from skipjoin.model.kernels.decode_attention import WorkList, decode_attention, share_out
from skipjoin.model.kernels.kv_write import kv_write
from skipjoin.model.kernels.prefill_attention import prefill_attention, query_tiles
from skipjoin.model.kernels.tuning import Config, TunedTable, table_path
from skipjoin.model.kv_cache import AUTO, PagedKV
from skipjoin.model.parallel import WHOLE, Shard
from skipjoin.model.transfer import to_device

# Torch attends in layers with wider heads.
MAX_HEAD_DIM = 256


@dataclass(slots=True)
class _Plan:
    """Values shared by all layers of one batch; `segments` of one token attend, or None for all."""

    batch: PackedBatch
    among: Sequence[int] | None
    decodes: int
    segments: torch.Tensor | None
    decode_config: Config
    tiles: torch.Tensor | None
    prefill_config: Config
    layer: int = -1
    work: dict[int, WorkList] = field(default_factory=dict)

    def work_of(self, layer: int, window: int) -> WorkList:
        """Return the work list of this pass. A graph repeats its batch, so a layer that repeats marks a new pass."""
        if layer <= self.layer:
            self.work = {}
        self.layer = layer
        if window not in self.work:
            self.work[window] = share_out(self.batch, self.segments, window=window, chunk=self.decode_config["CHUNK"])
        return self.work[window]


class TritonAttention(AttentionBackend):
    """Triton attention for equal strides of keys and values, and heads of up to 256 values.

    Kernels and grids do not depend on index tensors, so a CUDA graph can replay decodes. With `invariant`, all batches
    use the same sizes, so that a sequence's result does not depend on the others.
    """

    name = "triton"

    def __init__(
        self, table: TunedTable | None = None, processors: int | None = None, *, invariant: bool = False
    ) -> None:
        self._table, self._processors = table, processors
        self._invariant = invariant
        if invariant:
            self.name = "triton-invariant"
        self._plans: dict[tuple[int, int], _Plan] = {}  # of one batch, by number and width of KV heads
        self._of_wide = TorchAttention()

    def run(self, heads: Heads, kv: PagedKV, batch: PackedBatch, call: Call) -> torch.Tensor:
        (query, key, value), (layer, softmax, window, cos_sin, norms) = heads, call
        if query.shape[2] > MAX_HEAD_DIM:
            if self._invariant:
                raise ValueError(f"batch_invariant needs heads of at most {MAX_HEAD_DIM} numbers, got {query.shape[2]}")
            return self._of_wide.run(heads, kv, batch, call)
        kv_write(query, key, value, *kv.layer(layer), kv.scales(layer), batch.slots, batch.positions, cos_sin, norms)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._fill(out, query, kv, batch, None, layer=layer, softmax=softmax, window=window)
        return out.flatten(1)

    def _fill(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        kv: PagedKV,
        batch: PackedBatch,
        among: Sequence[int] | None,
        *,
        layer: int,
        softmax: Softmax,
        window: int,
    ) -> None:
        cache = (*kv.layer(layer), kv.scales(layer))
        kind = cache[0].shape[2], query.shape[2]
        plan = self._plans.get(kind)
        # Compared by identity; holding the batch keeps its identity from being reused.
        if plan is None or plan.batch is not batch or plan.among is not among:
            plan = self._plans[kind] = self._plan(query, kind[0], batch, among)
        if plan.decodes:
            decode_attention(
                out, query, *cache, batch.block_tables, plan.work_of(layer, window),
                softmax=softmax, processors=self._processors or _card(query.device).processors,
                config=plan.decode_config,
            )  # fmt: skip
        if plan.tiles is not None:
            prefill_attention(
                out, query, *cache, batch, plan.tiles,
                softmax=softmax, window=window, config=plan.prefill_config,
            )  # fmt: skip

    def tune(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int, shard: Shard = WHOLE
    ) -> None:
        """Measure kernel sizes and keep them on disk. Takes up to 2 GiB, and must not run in a capture."""
        if device.type == "cuda" and not self._invariant and config.head_dim <= MAX_HEAD_DIM:
            kv_heads = len(shard.kv_heads(config))
            card, group = _card(device), len(shard.heads(config)) // kv_heads
            shape = Shape(dtype, group, config.head_dim, block_size, card.wgmma)
            processors = self._processors or card.processors
            tune_attention(self._table_of(device), shape, kv_heads, device, processors, card.cache_bytes)
            torch.cuda.empty_cache()

    def versions(
        self, config: ModelConfig, block_size: int, seqs: int, positions: int, shard: Shard
    ) -> list[tuple[tuple[int, ...], int]]:
        kv_heads = len(shard.kv_heads(config))
        return distinct_batches(len(shard.heads(config)) // kv_heads, kv_heads, block_size, seqs, positions)

    def _plan(self, query: torch.Tensor, kv_heads: int, batch: PackedBatch, among: Sequence[int] | None) -> _Plan:
        device, (_, heads, dim) = query.device, query.shape
        shape = Shape(query.dtype, heads // kv_heads, dim, batch.block_size, _card(device).wgmma)
        table = self._table_of(device)
        attending = range(len(batch.lengths)) if among is None else among
        decodes = [i for i in attending if batch.lengths[i] == 1]
        chunks = [i for i in attending if batch.lengths[i] > 1]
        decode_config = table.find(*decode_choice(shape, len(decodes) * kv_heads))
        prefill_config = table.find(*prefill_choice(shape, max(batch.lengths[i] for i in attending)))
        if self._invariant:
            decode_config = decode_choice(shape, 1)[-1][0]
            prefill_config = prefill_choice(shape, 4096)[-1][0]
        segments = tiles = None
        if chunks or among is not None:
            per_tile = prefill_config["BLOCK_M"] // shape.group
            tile_list = query_tiles(batch, chunks, per_tile).ravel() if chunks else ()
            listed = np.asarray([*decodes, *tile_list], np.int64)
            index = to_device(torch.from_numpy(listed), device)
            segments = index[: len(decodes)]
            tiles = index[len(decodes) :].view(-1, 2) if chunks else None
        return _Plan(batch, among, len(decodes), segments, decode_config, tiles, prefill_config)

    def _table_of(self, device: torch.device) -> TunedTable:
        if self._table is None:
            cuda = device.type == "cuda"
            path = table_path(torch.cuda.get_device_name(device), triton.__version__) if cuda else None
            self._table = TunedTable(path)
        return self._table


class _Card(NamedTuple):
    processors: int
    cache_bytes: int
    wgmma: bool


@functools.cache
def _card(device: torch.device) -> _Card:
    if device.type != "cuda":
        return _Card(1, 0, wgmma=True)
    found = torch.cuda.get_device_properties(device)
    return _Card(found.multi_processor_count, found.L2_cache_size, wgmma=found.major == 9)


def check_triton_attention(
    backend: TritonAttention, dtype: torch.dtype, device: torch.device | str, of: CacheFormat = AUTO
) -> bool:
    return agrees(backend, dtype, device, of=of)
