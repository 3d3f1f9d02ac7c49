from __future__ import annotations

import ctypes

import torch

from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.attention.check import agrees, cuts_change_nothing
from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.calls import AttentionCall, cache_arguments, check_sizes
from skipjoin.model.ops.cpp_ops import CPP_DTYPES
from skipjoin.model.ops.threads import threads_here

_I, _P = ctypes.c_int64, ctypes.c_void_p


class CppAttention(AttentionBackend):
    """Compiled attention. Keys and values of the cache must have equal strides."""

    name = "cpp"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.skipjoin_paged_attention
        self._run.argtypes = [ctypes.c_int64, ctypes.POINTER(AttentionCall), ctypes.c_int64]
        self._run.restype = None
        self._rotate = library.skipjoin_rotate
        self._rotate.argtypes = [_I, _P, _I, _I, _I, _I, _P, _P, _I, _I]
        self._rotate.restype = None
        check_sizes(library, {"skipjoin_attention_call_bytes": AttentionCall})

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
    ) -> torch.Tensor:
        if cos_sin is not None:
            self.rotate(query, key, batch.positions, cos_sin)
        keys, values = kv.layer(layer)
        tokens, heads, dim = query.shape
        out = torch.empty((tokens, heads * dim), dtype=query.dtype)
        call = AttentionCall(
            query.data_ptr(), key.data_ptr(), value.data_ptr(),
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
            keys.data_ptr(), values.data_ptr(), out.data_ptr(), *cache_arguments(batch, kv),
            heads, key.shape[1], dim, window, scale, cap, None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        self._run(CPP_DTYPES.index(query.dtype), call, threads_here())
        return out

    def rotate(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        for x in (query, key):
            self._rotate(
                CPP_DTYPES.index(x.dtype), x.data_ptr(), x.shape[0], x.stride(0), x.shape[1], x.stride(1),
                positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[1] // 2, threads_here(),
            )  # fmt: skip


def check_attention(backend: CppAttention, dtype: torch.dtype) -> bool:
    return all(
        agrees(backend, dtype, of=of, variants=True) and cuts_change_nothing(backend, dtype, of)
        for of in CACHE_FORMATS.values()
        if backend.name in of.readers
    )
