from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from skipjoin.model.adapters import AdaptedLinear
from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.base import LayerParts
from skipjoin.model.ops.build import declare
from skipjoin.model.ops.calls import (
    AdaptedCall,
    AttentionCall,
    LayerCall,
    PairCall,
    StepCall,
    address,
    cache_arguments,
    check_sizes,
)
from skipjoin.model.ops.compiled_linear import CompiledLinear
from skipjoin.model.ops.threads import threads_here

# Elements between the outputs of two operations, so that they begin with a line of the cache.
_LINE = 64


class LayerShape(NamedTuple):
    """What layers must share: widths of outputs in the order of `StepCall`; query heads, KV heads, head size."""

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
    def __init__(
        self,
        library: ctypes.CDLL,
        kind: int,
        scratch: Callable[[int, int, int], int],
        layers: Sequence[LayerParts],
        calls: Sequence[LayerCall],
        *,
        final_norm: torch.Tensor | None,
        adapted: Sequence[object],
    ) -> None:
        sizes = {"layer": LayerCall, "step": StepCall, "pair": PairCall}
        check_sizes(library, {f"skipjoin_{name}_bytes": call for name, call in sizes.items()})
        self._run = declare(library.skipjoin_layers, ctypes.c_int64, ctypes.POINTER(StepCall))
        self._kind, self._scratch = kind, scratch
        self._layers, self._final_norm = layers, final_norm  # keeps the weights in memory
        self._calls = (LayerCall * len(calls))(*calls)
        self._shape = shape_of(layers[0], calls[0])
        self._adapted = [linear if isinstance(linear, AdaptedLinear) else None for linear in adapted]
        # By number of the adapter, with the largest rank.
        self._pairs: dict[int, tuple[ctypes.Array[PairCall], int]] = {}
        self._inputs = {linear.k for linear in (calls[0].qkv, calls[0].output, calls[0].up, calls[0].down)}

    def __call__(self, x: torch.Tensor, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        rows, count, threads = x.shape[0], len(self._calls), threads_here()
        sizes = [-(-rows * width // _LINE) * _LINE for width in self._shape.widths]
        outputs = torch.empty(sum(sizes), dtype=x.dtype)
        begins = accumulate(sizes[:-1], initial=0)
        attention = AttentionCall(
            *[None] * 3, *[0] * 6, *[None] * 3, *cache_arguments(batch, kv), *self._shape.heads, 0,
            self._shape.scale, self._shape.cap, None,
        )  # fmt: skip
        caches = [kv.layer(parts.attention.layer) for parts in self._layers]
        addresses = ctypes.c_void_p * count
        adapted, rank = self._adapted_calls()
        low = torch.empty(rows * rank, dtype=x.dtype)
        delta = torch.empty(rows * self._calls[0].up.n if adapted else 0, dtype=x.dtype)
        # Growing moves the memory, so only the last address is valid.
        scratch = [self._scratch(rows, inputs, threads) for inputs in (*self._inputs, rank)][-1]
        step = StepCall(
            self._calls, count, rows, x.data_ptr(),
            *(outputs.data_ptr() + begin * x.itemsize for begin in begins),
            addresses(*(keys.data_ptr() for keys, _ in caches)),
            addresses(*(values.data_ptr() for _, values in caches)),
            attention, batch.positions.data_ptr(), address(self._final_norm), scratch, threads, x.itemsize,
            (AdaptedCall * len(adapted))(*adapted), len(adapted), low.data_ptr(), delta.data_ptr(),
        )  # fmt: skip
        self._run(self._kind, step)
        return x

    def _adapted_calls(self) -> tuple[list[AdaptedCall], int]:
        adapters = next((linear.adapters for linear in self._adapted if linear is not None), None)
        if adapters is None or not adapters.active:
            return [], 0
        calls, largest = [], 0
        for number, rows in adapters.active:
            assert isinstance(rows, slice)
            pairs, rank = self._pairs_of(number)
            calls.append(AdaptedCall(pairs, rows.start, rows.stop - rows.start))
            largest = max(largest, rank)
        return calls, largest

    def _pairs_of(self, number: int) -> tuple[ctypes.Array[PairCall], int]:
        if (found := self._pairs.get(number)) is not None:
            return found
        made, rank = (PairCall * len(self._adapted))(), 0
        for at, linear in enumerate(self._adapted):
            pair = None if linear is None else linear.pair(number)
            if pair is not None:
                down, up = pair
                assert isinstance(down, CompiledLinear)
                assert isinstance(up, CompiledLinear)
                made[at], rank = PairCall(down.call(), up.call()), max(rank, down.outputs)
        loaded = {} if self._adapted[0] is None else self._adapted[0].adapters.bytes
        self._pairs = {old: kept for old, kept in self._pairs.items() if old in loaded}
        self._pairs[number] = made, rank
        return made, rank
