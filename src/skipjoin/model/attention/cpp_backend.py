from __future__ import annotations

import ctypes

import torch

from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model.attention.base import AttentionBackend, Call, Heads
from skipjoin.model.attention.check import agrees, cuts_change_nothing
from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.base import WholeText, longest
from skipjoin.model.ops.build import declare
from skipjoin.model.ops.calls import CPP_DTYPES, AttentionCall, HeadsCall, address, cache_arguments, check_sizes
from skipjoin.model.ops.threads import threads_here


class CppAttention(AttentionBackend):
    """Compiled attention, for equal strides of keys and values."""

    name = "cpp"

    def __init__(self, library: ctypes.CDLL) -> None:
        number, pointer = ctypes.c_int64, ctypes.POINTER
        self._run = declare(library.skipjoin_paged_attention, number, pointer(AttentionCall), number)
        self._prepare = declare(library.skipjoin_prepare_heads, number, pointer(HeadsCall), number)
        check_sizes(library, {"skipjoin_attention_call_bytes": AttentionCall, "skipjoin_heads_bytes": HeadsCall})

    def run(self, heads: Heads, kv: PagedKV, batch: PackedBatch, call: Call) -> torch.Tensor:
        (query, key, value), (layer, softmax, window, cos_sin, norms) = heads, call
        if norms is not None:
            query, key = norms(query, key)
        if cos_sin is not None:
            self.rotate(query, key, batch.positions, cos_sin)
        keys, values = kv.layer(layer)
        tokens, count, dim = query.shape
        out = torch.empty((tokens, count * dim), dtype=query.dtype)
        arguments = AttentionCall(
            query.data_ptr(), key.data_ptr(), value.data_ptr(),
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
            keys.data_ptr(), values.data_ptr(), out.data_ptr(), *cache_arguments(batch, kv, layer),
            count, key.shape[1], dim, window, softmax.scale, softmax.cap, address(softmax.sinks),
        )  # fmt: skip
        self._run(CPP_DTYPES.index(query.dtype), arguments, threads_here())
        return out

    def attend_whole(self, heads: Heads, batch: PackedBatch, how: WholeText) -> torch.Tensor:
        query, key, value = heads
        if how.cos_sin is not None:
            self.rotate(query, key, batch.positions, how.cos_sin)
        if key.stride() != value.stride():
            key, value = key.contiguous(), value.contiguous()
        tokens, count, dim = query.shape
        out = torch.empty((tokens, count * dim), dtype=query.dtype)
        bias = how.by_distance
        call = AttentionCall(
            query=query.data_ptr(), query_token=query.stride(0), query_head=query.stride(1), keys=key.data_ptr(),
            values=value.data_ptr(), out=out.data_ptr(), slot_stride=key.stride(0), head_stride=key.stride(1),
            query_start=batch.query_start.data_ptr(), segments=len(batch.lengths), heads=count, kv_heads=key.shape[1],
            dim=dim, window=how.window, scale=how.scale, whole=1,
        )  # fmt: skip
        if bias is not None:
            call.bias, call.bias_stride, call.bias_middle = bias.data_ptr(), bias.stride(0), longest(bias) - 1
        self._run(CPP_DTYPES.index(query.dtype), call, threads_here())
        return out

    def rotate(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        for x in (query, key):
            call = HeadsCall(
                x=x.data_ptr(), token_stride=x.stride(0), head_stride=x.stride(1), tokens=x.shape[0], heads=x.shape[1],
                dim=x.shape[2], cos_sin=cos_sin.data_ptr(), positions=positions.data_ptr(),
                pairs=cos_sin.shape[1] // 2,
            )  # fmt: skip
            self._prepare(CPP_DTYPES.index(x.dtype), call, threads_here())


def check_attention(backend: CppAttention, dtype: torch.dtype) -> bool:
    return all(
        agrees(backend, dtype, of=of, variants=True) and cuts_change_nothing(backend, dtype, of)
        for of in CACHE_FORMATS.values()
        if backend.name in of.readers
    )
