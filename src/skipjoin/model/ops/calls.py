from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_double, c_int64, c_void_p

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.build import declare

# In the order of `Type` in outputs.inc.cpp.
CPP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_I, _P = c_int64, c_void_p


class GroupsCall(ctypes.Structure):
    _fields_ = (
        ("strips", _P), ("strip_bytes", _I), ("outputs", _I), ("inputs", _I), ("bits", _I), ("group", _I),
        ("offset", _I), ("scale_bytes", _I), ("has_minimums", _I), ("values", _P), ("bias", _P),
    )  # fmt: skip


class LinearCall(ctypes.Structure):
    _fields_ = (
        ("x", _P), ("x_stride", _I), ("rows", _I), ("weights", _P), ("bias", _P), ("groups", _P), ("matrices", _I),
        ("n", _I), ("k", _I), ("out", _P), ("out_stride", _I), ("gated", _I), ("add", _I), ("activation", _I),
        ("scratch", _P), ("threads", _I), ("way", _I), ("then", _P), ("then_bytes", _I), ("delta", _P),
        ("delta_stride", _I),
    )  # fmt: skip


class HeadsCall(ctypes.Structure):
    _fields_ = (
        ("x", _P), ("token_stride", _I), ("head_stride", _I), ("tokens", _I), ("heads", _I), ("dim", _I),
        ("weight", _P), ("eps", c_double), ("offset", c_double), ("cos_sin", _P), ("positions", _P), ("pairs", _I),
    )  # fmt: skip


class ExpertsCall(ctypes.Structure):
    _fields_ = (
        ("up", ctypes.POINTER(LinearCall)), ("down", ctypes.POINTER(LinearCall)), ("count", _I), ("per_row", _I),
        ("among", _I), ("scale", c_double), ("x", _P), ("x_stride", _I), ("rows", _I), ("chosen", _P), ("shares", _P),
        ("total", _P), ("threads", _I),
    )  # fmt: skip


class AttentionCall(ctypes.Structure):
    _fields_ = (
        ("query", _P), ("key", _P), ("value", _P), ("query_token", _I), ("query_head", _I), ("key_token", _I),
        ("key_head", _I), ("value_token", _I), ("value_head", _I), ("keys", _P), ("values", _P), ("out", _P),
        ("block_stride", _I), ("slot_stride", _I), ("head_stride", _I), ("slots", _P), ("query_start", _P),
        ("context", _P), ("tables", _P), ("reversed", _P), ("segments", _I), ("table_width", _I),
        ("block_size", _I), ("is_int8", _I), ("heads", _I), ("kv_heads", _I), ("dim", _I), ("window", _I),
        ("scale", c_double), ("cap", c_double), ("sinks", _P), ("whole", _I), ("bias", _P), ("bias_stride", _I),
        ("bias_middle", _I),
    )  # fmt: skip


def cache_arguments(batch: PackedBatch, kv: PagedKV, layer: int = 0) -> tuple[int | None, ...]:
    down = None if batch.plain else batch.reversed.data_ptr()
    return (
        *kv.layer(layer)[0].stride()[:3], batch.slots.data_ptr(), batch.query_start.data_ptr(),
        batch.context_lens.data_ptr(), batch.block_tables.data_ptr(), down, *batch.block_tables.shape, kv.block_size,
        kv.format.has_scale,
    )  # fmt: skip


class LayerCall(ctypes.Structure):
    _fields_ = (
        ("qkv", LinearCall), ("output", LinearCall), ("up", LinearCall), ("down", LinearCall), ("norm", _P),
        ("mlp_norm", _P), ("after_attention", _P), ("after_mlp", _P), ("query_norm", _P), ("key_norm", _P),
        ("cos_sin", _P), ("pairs", _I), ("window", _I), ("eps", c_double), ("offset", c_double), ("sinks", _P),
        ("experts", ctypes.POINTER(ExpertsCall)),
    )  # fmt: skip


class PairCall(ctypes.Structure):
    _fields_ = (("down", LinearCall), ("up", LinearCall))


class AdaptedCall(ctypes.Structure):
    _fields_ = (("pairs", ctypes.POINTER(PairCall)), ("first", _I), ("rows", _I))


class StepCall(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(LayerCall)), ("count", _I), ("rows", _I), ("x", _P), ("normed", _P), ("qkv", _P),
        ("attended", _P), ("inner", _P), ("keys", ctypes.POINTER(_P)), ("values", ctypes.POINTER(_P)),
        ("attention", AttentionCall), ("positions", _P), ("final_norm", _P), ("scratch", _P), ("threads", _I),
        ("itemsize", _I), ("adapted", ctypes.POINTER(AdaptedCall)), ("adapters", _I), ("low", _P), ("delta", _P),
    )  # fmt: skip


def address(values: torch.Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def check_sizes(library: ctypes.CDLL, sizes: Mapping[str, type[ctypes.Structure]]) -> None:
    for name, structure in sizes.items():
        if declare(getattr(library, name), returns=c_int64)() != ctypes.sizeof(structure):
            raise OSError("the compiled operations have another version")
