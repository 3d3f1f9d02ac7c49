from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch

from skipjoin.model.attention.base import Call, Heads
from skipjoin.model.attention.triton_backend import MAX_HEAD_DIM, TritonAttention
from skipjoin.model.batch import PackedBatch
from skipjoin.model.cuda import FLASH_MODULE
from skipjoin.model.kernels.kv_write import kv_write
from skipjoin.model.kernels.tuning import TunedTable
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.transfer import to_device

# Parameters that earlier and other versions lack.
_PARAMETERS = {
    "flash_attn_with_kvcache": ("cache_seqlens", "page_table", "cu_seqlens_q", "scheduler_metadata", "window_size"),
    "get_scheduler_metadata": ("cache_seqlens", "cu_seqlens_q", "page_size", "window_size"),
}
_DTYPES = (torch.bfloat16, torch.float16)


def library() -> Any:
    found = import_module(FLASH_MODULE)
    for name, needed in _PARAMETERS.items():
        function = getattr(found, name, None)
        if function is None:
            raise ImportError(f"{FLASH_MODULE} has no {name}: it is not FlashAttention 3")
        if missing := [name for name in needed if name not in inspect.signature(function).parameters]:
            raise ImportError(
                f"{FLASH_MODULE}.{name} has no {missing[0]}: another version of FlashAttention 3 is needed"
            )
    return found


@dataclass(slots=True)
class _Index:
    batch: PackedBatch
    rows: torch.Tensor | None
    tables: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    longest: int
    layer: int
    schedules: dict[int, torch.Tensor] = field(default_factory=dict)


class FlashAttention(TritonAttention):
    """FlashAttention 3, for Hopper GPUs. Triton writes the KV, and attends where it lacks an option, a size or a type.

    Index values are only read on the device, so that a CUDA graph can replay a forward pass.
    """

    name = "flash"

    def __init__(self, table: TunedTable | None = None, processors: int | None = None) -> None:
        super().__init__(table, processors)
        self._library = library()
        self._index: _Index | None = None

    def run(self, heads: Heads, kv: PagedKV, batch: PackedBatch, call: Call) -> torch.Tensor:
        query, key, value = heads
        (layer, softmax, window, cos_sin, norms), dim = call, query.shape[2]
        has_plain = len(batch.directed) < len(batch.lengths)
        is_known = query.dtype in _DTYPES and dim % 8 == 0 and dim <= MAX_HEAD_DIM
        if softmax.cap or softmax.sinks is not None or not (has_plain and is_known):
            return super().run(heads, kv, batch, call)
        kv_write(query, key, value, *kv.layer(layer), None, batch.slots, batch.positions, cos_sin, norms)
        index = self._index_of(batch, layer)
        if index.rows is None:
            return self._of_library(query, kv, index, call).flatten(1)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        out[index.rows] = self._of_library(query[index.rows], kv, index, call)
        self._fill(out, query, kv, batch, batch.directed, layer=layer, softmax=softmax, window=window)
        return out.flatten(1)

    def _of_library(self, query: torch.Tensor, kv: PagedKV, index: _Index, call: Call) -> torch.Tensor:
        window, (keys, values) = call.window, kv.layer(call.layer)
        block_size, kv_heads = keys.shape[1:3]
        sides = (window - 1, 0) if window else (-1, -1)
        if window not in index.schedules:
            index.schedules[window] = self._library.get_scheduler_metadata(
                len(index.context_lens),
                index.longest,
                index.tables.shape[1] * block_size,
                query.shape[1],
                kv_heads,
                query.shape[2],
                index.context_lens,
                qkv_dtype=query.dtype,
                cu_seqlens_q=index.query_start,
                page_size=block_size,
                causal=True,
                window_size=sides,
            )
        out: torch.Tensor = self._library.flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=index.context_lens,
            page_table=index.tables,
            cu_seqlens_q=index.query_start,
            max_seqlen_q=index.longest,
            softmax_scale=call.softmax.scale,
            causal=True,
            window_size=sides,
            scheduler_metadata=index.schedules[window],
        )
        return out

    def _index_of(self, batch: PackedBatch, layer: int) -> _Index:
        known = self._index
        if known is None or known.batch is not batch or layer <= known.layer:
            known = _new_index(batch, layer)
        known.layer = layer
        self._index = known
        return known


def _new_index(batch: PackedBatch, layer: int) -> _Index:
    tables, context_lens, query_start = batch.block_tables, batch.context_lens, batch.query_start
    lengths, rows = batch.lengths, None
    if not batch.plain:
        directed = set(batch.directed)
        plain = [i for i in range(len(lengths)) if i not in directed]
        owners = np.repeat(np.arange(len(lengths)), lengths)
        lengths = [lengths[i] for i in plain]
        listed = (np.asarray(plain), np.flatnonzero(~np.isin(owners, batch.directed)), np.cumsum([0, *lengths]))
        index = to_device(torch.from_numpy(np.concatenate(listed)), tables.device)
        segments, rows, query_start = index.split([len(table) for table in listed])
        tables, context_lens = tables[segments], context_lens[segments]
    tables, context_lens, query_start = (part.to(torch.int32) for part in (tables, context_lens, query_start))
    return _Index(batch, rows, tables, context_lens, query_start, max(lengths), layer)
