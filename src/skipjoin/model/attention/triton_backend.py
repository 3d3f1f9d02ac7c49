"""Attention in Triton kernels, for CUDA; in Triton's interpreter also on a CPU, where it is for tests only."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton

from skipjoin.model.attention.check import agrees
from skipjoin.model.batch import PackedBatch
from skipjoin.model.kernels import decode_attention as decode_kernel
from skipjoin.model.kernels import paged
from skipjoin.model.kernels import prefill_attention as prefill_kernel
from skipjoin.model.kernels.decode_attention import choose_splits, decode_attention, decode_configs
from skipjoin.model.kernels.kv_write import kv_write
from skipjoin.model.kernels.prefill_attention import prefill_attention, prefill_configs, query_tiles
from skipjoin.model.kernels.tuning import Config, TunedTable, source_hash, table_path
from skipjoin.model.kv_cache import PagedKV

MAX_HEAD_DIM = 256
_SOURCES = source_hash(*(module.__file__ for module in (paged, decode_kernel, prefill_kernel)))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all layers of one batch share. decodes: of how many segments there is one token; they are `segments`, or
    all if that is None. tiles: of the other segments' queries."""

    decodes: int
    segments: torch.Tensor | None
    splits: int
    decode_config: Config
    tiles: torch.Tensor | None
    prefill_config: Config


class TritonAttention:
    """See `AttentionBackend`. Keys and values of the cache must have equal strides; heads of up to 256 values.

    Tokens whose slot is -1 are not written; a segment whose context is 0 gets zeros. A batch of decodes runs the same
    kernels with the same grids whatever its index tensors hold, so that a CUDA graph can replay it.
    """

    name = "triton"

    def __init__(self, table: TunedTable | None = None, processors: int | None = None) -> None:
        """table: the kernels' sizes; None: of the device, from disk. processors: to share the work out over; None: as
        many as the device has."""
        self._table, self._processors = table, processors
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
        # By identity, and the batch is held: another one cannot take its place.
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

    def _plan(self, query: torch.Tensor, key: torch.Tensor, batch: PackedBatch) -> _Plan:
        device, (_, heads, dim), kv_heads = query.device, query.shape, key.shape[1]
        group, itemsize = heads // kv_heads, query.element_size()
        if dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {dim}, the kernels take at most {MAX_HEAD_DIM}")
        table, processors = self._table_of(device), self._processors or _processors(device)
        shape = (str(query.dtype).removeprefix("torch."), group, dim, batch.block_size)
        decodes = [i for i, length in enumerate(batch.lengths) if length == 1]
        chunks = [i for i, length in enumerate(batch.lengths) if length > 1]
        index, tiles = [np.asarray(decodes if chunks else [], np.int64)], None
        prefill_config = prefill_configs(group, dim, itemsize, 0)[0]
        if chunks:
            rows = max(batch.lengths) * group
            configs = prefill_configs(group, dim, itemsize, rows)
            prefill_config = table.find("prefill", _SOURCES, (*shape, _bucket(rows)), configs)
            tiles = query_tiles(batch, chunks, prefill_config["BLOCK_M"] // group)
            index.append(tiles.ravel())
        on_device = _copied(np.concatenate(index), device)
        work = len(decodes) * kv_heads
        return _Plan(
            decodes=len(decodes),
            segments=on_device[: len(decodes)] if chunks else None,
            splits=choose_splits(len(decodes), kv_heads, batch.block_tables.shape[1] * batch.block_size, processors),
            decode_config=table.find("decode", _SOURCES, (*shape, _bucket(work)), decode_configs(group, dim, itemsize)),
            tiles=on_device[index[0].size :].view(-1, 2) if chunks else None,
            prefill_config=prefill_config,
        )

    def _table_of(self, device: torch.device) -> TunedTable:
        if self._table is None:
            cuda = device.type == "cuda"
            self._table = TunedTable(
                table_path(torch.cuda.get_device_name(device), triton.__version__) if cuda else None
            )
        return self._table


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _bucket(work: int) -> int:
    """Sizes that share one choice: the next power of four."""
    bucket = 1
    while bucket < work:
        bucket *= 4
    return bucket


def _copied(index: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(index)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and index.size else tensor


def check_triton_attention(backend: TritonAttention, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether the kernels agree with the reference on a small mixed batch on this device."""
    return agrees(backend, dtype, device)
