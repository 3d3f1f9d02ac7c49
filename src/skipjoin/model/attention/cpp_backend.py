"""Attention in compiled code, for CPUs."""

from __future__ import annotations

import ctypes

import torch

from skipjoin.model.attention.check import agrees, cuts_change_nothing
from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.cpp_ops import CPP_DTYPES
from skipjoin.model.ops.threads import threads_here
from skipjoin.model.parallel import Shard

_I, _P = ctypes.c_int64, ctypes.c_void_p
_POINTERS = ("query", "key", "value")
_STRIDES = ("query_token", "query_head", "key_token", "key_head", "value_token", "value_head")
_CACHE = ("block_stride", "slot_stride", "head_stride")
_INDEX = ("slots", "query_start", "context", "tables", "offsets", "reversed")
_SHAPE = ("segments", "table_width", "block_size", "heads", "kv_heads", "dim", "window")


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _CACHE),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _INDEX),
        *((name, ctypes.c_int64) for name in _SHAPE),
        ("scale", ctypes.c_double),
    )


class CppAttention:
    """Compiled attention. Keys and values of the cache must have equal strides."""

    name = "cpp"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.skipjoin_paged_attention
        self._run.argtypes = [ctypes.c_int64, ctypes.POINTER(_Call), ctypes.c_int64]
        self._run.restype = None
        self._rotate = library.skipjoin_rotate
        self._rotate.argtypes = [_I, _P, _I, _I, _I, _I, _P, _P, _I, _I]
        self._rotate.restype = None
        library.skipjoin_attention_call_bytes.restype = ctypes.c_int64
        if library.skipjoin_attention_call_bytes() != ctypes.sizeof(_Call):
            raise OSError("the compiled operations have another version")

    def tune(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int, shard: Shard
    ) -> None: ...

    def versions(self, config: ModelConfig, block_size: int, seqs: int, positions: int, shard: Shard) -> tuple[()]:
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
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if cos_sin is not None:
            self.rotate(query, key, batch.positions, cos_sin)
        keys, values = kv.layer(layer)
        tokens, heads, dim = query.shape
        ends = (None, None) if batch.plain else (batch.offsets.data_ptr(), batch.reversed.data_ptr())
        out = torch.empty((tokens, heads * dim), dtype=query.dtype)
        call = _Call(
            query.data_ptr(), key.data_ptr(), value.data_ptr(),
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
            keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], out.data_ptr(),
            batch.slots.data_ptr(), batch.query_start.data_ptr(), batch.context_lens.data_ptr(),
            batch.block_tables.data_ptr(), *ends, *batch.block_tables.shape, kv.block_size,
            heads, key.shape[1], dim, window, scale,
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
    return agrees(backend, dtype) and cuts_change_nothing(backend, dtype)
