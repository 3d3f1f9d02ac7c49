from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.base import LayerParts
from skipjoin.model.ops.calls import AttentionCall, LayerCall, StepCall, cache_arguments, check_sizes
from skipjoin.model.ops.threads import threads_here

# Elements between the outputs of two operations, so that they begin with a line of the cache.
_LINE = 64


class LayerShape(NamedTuple):
    """What layers must share: widths of outputs in the order of `StepCall`, query heads, KV heads, head size."""

    widths: tuple[int, ...]
    heads: tuple[int, int, int]
    scale: float
    cap: float
    eps: float
    offset: float


def shape_of(parts: LayerParts, call: LayerCall) -> LayerShape:
    heads, kv_heads, dim = parts.attention.heads, parts.attention.kv_heads, parts.attention.dim
    widths = call.qkv.k, call.qkv.n, call.output.k, call.up.n if call.experts else call.down.k
    return LayerShape(widths, (heads, kv_heads, dim), parts.attention.scale, parts.attention.cap, call.eps, call.offset)


class CppLayers:
    """`FusedLayers` in one call of compiled code. Not thread-safe, as `CppOps`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        kind: int,
        scratch: Callable[[int, int, int], int],
        layers: Sequence[LayerParts],
        calls: Sequence[LayerCall],
        *,
        final_norm: torch.Tensor | None,
    ) -> None:
        check_sizes(library, {"skipjoin_layer_bytes": LayerCall, "skipjoin_step_bytes": StepCall})
        self._run = library.skipjoin_layers
        self._run.argtypes, self._run.restype = [ctypes.c_int64, ctypes.POINTER(StepCall)], None
        self._kind, self._scratch = kind, scratch
        self._layers, self._final_norm = layers, final_norm  # keeps the weights in memory
        self._calls = (LayerCall * len(calls))(*calls)
        self._shape = shape_of(layers[0], calls[0])
        self._inputs = {linear.k for linear in (calls[0].qkv, calls[0].output, calls[0].up, calls[0].down)}

    def __call__(self, x: torch.Tensor, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        rows, count, threads = x.shape[0], len(self._calls), threads_here()
        sizes = [-(-rows * width // _LINE) * _LINE for width in self._shape.widths]
        outputs = torch.empty(sum(sizes), dtype=x.dtype)
        begins = accumulate(sizes[:-1], initial=0)
        attention = AttentionCall(
            *[None] * 3,
            *[0] * 6,
            *[None] * 3,
            *cache_arguments(batch, kv),
            *self._shape.heads,
            0,
            self._shape.scale,
            self._shape.cap,
            None,
        )
        caches = [kv.layer(parts.attention.layer) for parts in self._layers]
        addresses = ctypes.c_void_p * count
        # Growing moves the memory, so only the last address is valid.
        scratch = [self._scratch(rows, inputs, threads) for inputs in self._inputs][-1]
        step = StepCall(
            self._calls, count, rows, x.data_ptr(),
            *(outputs.data_ptr() + begin * x.itemsize for begin in begins),
            addresses(*(keys.data_ptr() for keys, _ in caches)),
            addresses(*(values.data_ptr() for _, values in caches)),
            attention, batch.positions.data_ptr(),
            None if self._final_norm is None else self._final_norm.data_ptr(), scratch, threads, x.itemsize,
        )  # fmt: skip
        self._run(self._kind, step)
        return x
