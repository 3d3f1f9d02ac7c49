"""Attention in Triton kernels, for CUDA; on a CPU in Triton's interpreter, for tests only."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton

from skipjoin.model.attention.check import agrees
from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.kernels.choices import Shape, decode_choice, distinct_batches, prefill_choice, tune_attention
from skipjoin.model.kernels.decode_attention import INVARIANT_SPLITS, choose_splits, decode_attention
from skipjoin.model.kernels.kv_write import kv_write
from skipjoin.model.kernels.prefill_attention import prefill_attention, query_tiles
from skipjoin.model.kernels.tuning import Config, TunedTable, table_path
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.parallel import WHOLE, Shard
from skipjoin.model.transfer import to_device

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class _Plan:
    """Values shared by all layers of one batch. decodes: number of segments of one token; their indexes are `segments`,
    None: all. tiles: of the other segments' queries."""

    decodes: int
    segments: torch.Tensor | None
    splits: int
    decode_config: Config
    tiles: torch.Tensor | None
    prefill_config: Config


class TritonAttention:
    """See `AttentionBackend`. Keys and values of the cache must have equal strides; heads of up to 256 values.

    Tokens with slot -1 are not written; a segment with context 0 gets zeros. A batch of decodes runs the same kernels
    with the same grids for all contents of its index tensors, so that a CUDA graph can replay it.
    """

    name = "triton"

    def __init__(
        self, table: TunedTable | None = None, processors: int | None = None, *, invariant: bool = False
    ) -> None:
        """table: the kernels' sizes; None: the device's table on disk. processors: number of multiprocessors to split
        the work for; None: the device's. invariant: a sequence's result must not depend on the others: sizes and
        number of splits are the same for all batches."""
        self._table, self._processors = table, processors
        self._invariant = invariant
        if invariant:
            self.name = "triton-invariant"
        self._planned: tuple[PackedBatch, _Plan] | None = None

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
        keys, values = kv.layer(layer)
        # Compared by identity; holding the batch keeps its identity from being reused.
        if self._planned is None or self._planned[0] is not batch:
            self._planned = batch, self._plan(query, key, batch)
        plan = self._planned[1]
        kv_write(query, key, value, keys, values, batch.slots, batch.positions, cos_sin)
        tokens, heads, dim = query.shape
        out = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
        shaped = out.view(tokens, heads, dim)
        options = {"scale": scale, "window": window}
        if plan.decodes:
            decode_attention(
                shaped, query, keys, values, batch,
                splits=plan.splits, config=plan.decode_config, segments=plan.segments, **options,
            )  # fmt: skip
        if plan.tiles is not None:
            prefill_attention(
                shaped, query, keys, values, batch, plan.tiles, config=plan.prefill_config, **options
            )  # fmt: skip
        return out

    def tune(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int, shard: Shard = WHOLE
    ) -> None:
        """See `AttentionBackend`: measures kernel sizes and keeps them on disk. Must not run in a capture; takes up to
        2 GiB. Without CUDA it does nothing."""
        if device.type == "cuda" and not self._invariant:
            kv_heads = len(shard.kv_heads(config))
            shape = Shape(dtype, len(shard.heads(config)) // kv_heads, config.head_dim, block_size)
            processors, cache_bytes = _card(device)
            tune_attention(self._table_of(device), shape, kv_heads, device, self._processors or processors, cache_bytes)
            torch.cuda.empty_cache()

    def versions(
        self, config: ModelConfig, block_size: int, seqs: int, positions: int, shard: Shard
    ) -> list[tuple[tuple[int, ...], int]]:
        """See `AttentionBackend`."""
        kv_heads = len(shard.kv_heads(config))
        return distinct_batches(len(shard.heads(config)) // kv_heads, kv_heads, block_size, seqs, positions)

    def _plan(self, query: torch.Tensor, key: torch.Tensor, batch: PackedBatch) -> _Plan:
        device, (_, heads, dim), kv_heads = query.device, query.shape, key.shape[1]
        if dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {dim}, the kernels take at most {MAX_HEAD_DIM}")
        shape = Shape(query.dtype, heads // kv_heads, dim, batch.block_size)
        table, processors = self._table_of(device), self._processors or _card(device)[0]
        decodes = [i for i, length in enumerate(batch.lengths) if length == 1]
        chunks = [i for i, length in enumerate(batch.lengths) if length > 1]
        slots = batch.block_tables.shape[1] * batch.block_size
        decode_config = table.find(*decode_choice(shape, len(decodes) * kv_heads))
        prefill_config = table.find(*prefill_choice(shape, max(batch.lengths)))
        splits = choose_splits(len(decodes), kv_heads, slots, processors)
        if self._invariant:
            decode_config = decode_choice(shape, 1)[-1][0]
            prefill_config, splits = prefill_choice(shape, 4096)[-1][0], INVARIANT_SPLITS
        segments = tiles = None
        if chunks:
            tile_list = query_tiles(batch, chunks, prefill_config["BLOCK_M"] // shape.group)
            listed = np.concatenate([np.asarray(decodes, np.int64), tile_list.ravel()])
            index = to_device(torch.from_numpy(listed), device)
            segments, tiles = index[: len(decodes)], index[len(decodes) :].view(-1, 2)
        return _Plan(len(decodes), segments, splits, decode_config, tiles, prefill_config)

    def _table_of(self, device: torch.device) -> TunedTable:
        if self._table is None:
            cuda = device.type == "cuda"
            path = table_path(torch.cuda.get_device_name(device), triton.__version__) if cuda else None
            self._table = TunedTable(path)
        return self._table


@functools.cache
def _card(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of the L2 cache."""
    if device.type != "cuda":
        return 1, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


def check_triton_attention(backend: TritonAttention, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the kernels agree with the reference on a small mixed batch on this device."""
    return agrees(backend, dtype, device)
