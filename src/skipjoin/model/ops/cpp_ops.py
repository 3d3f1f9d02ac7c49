from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float, c_int64, c_void_p

import torch

from skipjoin.model.attention.base import AttentionBackend, Heads, HeadWeights
from skipjoin.model.attention.cpp_backend import CppAttention
from skipjoin.model.batch import PackedBatch
from skipjoin.model.groups import GroupedMatrix
from skipjoin.model.large_pages import Arena
from skipjoin.model.layers import products_of, without_adapters
from skipjoin.model.modules import Adjusted
from skipjoin.model.ops.base import (
    Experts,
    FusedLayers,
    HeadNorm,
    LayerParts,
    Linear,
    Matrices,
    Norm,
    Routed,
    WholeText,
)
from skipjoin.model.ops.build import declare, library_id, path_of
from skipjoin.model.ops.calls import CPP_DTYPES, ExpertsCall, GroupsCall, LayerCall, LinearCall, address, check_sizes
from skipjoin.model.ops.choice import WAYS, Choices
from skipjoin.model.ops.compiled_linear import CompiledLinear, check_ids
from skipjoin.model.ops.cpp_groups import GroupedLinear
from skipjoin.model.ops.cpp_layers import CppLayers, shape_of
from skipjoin.model.ops.cpp_recurrent import CppRecurrent
from skipjoin.model.ops.experts import LoopedExperts
from skipjoin.model.ops.recurrent import RecurrentOps
from skipjoin.model.ops.threads import share_between, threads_here
from skipjoin.model.ops.torch_ops import TorchLayerNorm, TorchRMSNorm
from skipjoin.system.container import usable_cpus


class CppExperts:
    def __init__(
        self, up: Sequence[CompiledLinear], down: Sequence[CompiledLinear], per_row: int, *, among: bool, scale: float
    ) -> None:
        self._linears = (*up, *down)  # keeps the weights in memory
        self._calls = [(LinearCall * len(up))(*(product.call() for product in part)) for part in (up, down)]
        pointers = (ctypes.cast(calls, ctypes.POINTER(LinearCall)) for calls in self._calls)
        self._ops, self.fixed = up[0].ops, ExpertsCall(*pointers, len(up), per_row, among, scale)

    def route(self, logits: torch.Tensor) -> Routed:
        rows, per_row = len(logits), self.fixed.per_row
        chosen = torch.empty((rows, per_row), dtype=torch.int64)
        shares = torch.empty((rows, per_row), dtype=torch.float32)
        self._ops.library.skipjoin_route(
            self._ops.type, logits.data_ptr(), logits.stride(0), rows, self.fixed, chosen.data_ptr(),
            shares.data_ptr(), threads_here(),
        )  # fmt: skip
        return Routed(chosen, shares)

    def add_to(self, x: torch.Tensor, routed: Routed, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        fixed = self.fixed
        call = ExpertsCall(
            fixed.up, fixed.down, fixed.count, fixed.per_row, fixed.among, fixed.scale, x.data_ptr(), x.stride(0),
            len(x), routed.chosen.data_ptr(), routed.shares.data_ptr(), total.data_ptr(),
            threads_here(),
        )  # fmt: skip
        self._ops.library.skipjoin_experts(self._ops.type, call)
        return total if then is None else then(total)


_I, _P = c_int64, c_void_p

_SIGNATURES: dict[str, tuple[Sequence[type], type | None]] = {
    "skipjoin_has_float16": ([], c_int64),
    "skipjoin_panel": ([], c_int64),
    "skipjoin_has_way": ([_I, _I], c_int64),
    "skipjoin_floats_are_faster": ([], c_int64),
    "skipjoin_scratch_bytes": ([_I] * 4, c_int64),
    "skipjoin_packed_bytes": ([_I] * 4, c_int64),
    "skipjoin_pack_weights": ([_I, ctypes.POINTER(_P), ctypes.POINTER(_I), _I, _I, _I, _P, _I], None),
    "skipjoin_panel_rows": ([_I, _P, _I, _P, _I, _P, _I], None),
    "skipjoin_strip_lanes": ([], c_int64),
    "skipjoin_strip_bytes": ([ctypes.POINTER(GroupsCall)], c_int64),
    "skipjoin_pack_groups": ([ctypes.POINTER(GroupsCall), _P, _P, _P, _I], None),
    "skipjoin_group_rows": ([_I, ctypes.POINTER(GroupsCall), _P, _I, _P, _I], None),
    "skipjoin_open_step": ([], None),
    "skipjoin_close_step": ([], None),
    "skipjoin_linear": ([_I, ctypes.POINTER(LinearCall)], None),
    "skipjoin_route": ([_I, _P, _I, _I, ctypes.POINTER(ExpertsCall), _P, _P, _I], None),
    "skipjoin_experts": ([_I, ctypes.POINTER(ExpertsCall)], None),
    "skipjoin_layer_norm": ([_I, _P, _I, _I, _I, _P, _P, c_float, _P, _I], None),
    "skipjoin_rms_norm": ([_I, _P, _I, _I, _I, _I, _I, _P, c_float, c_float, _P, _I], None),
}


def has_dtype(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    return dtype != torch.float16 or bool(library.skipjoin_has_float16())


class CppOps:
    """Compiled layer operations; `way` None takes the fastest. Not thread-safe: products share one scratch buffer."""

    name = "cpp"
    reads_codes = True

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, way: str | None = None) -> None:
        for name, (arguments, result) in _SIGNATURES.items():
            declare(getattr(library, name), *arguments, returns=result)
        sizes = {"linear": LinearCall, "groups": GroupsCall, "experts": ExpertsCall}
        check_sizes(library, {f"skipjoin_{name}_bytes": call for name, call in sizes.items()})
        self.library = library
        self.dtype, self.type = dtype, CPP_DTYPES.index(dtype)
        has_floats = "floats" in self.ways()
        self._without_tiles = "floats" if has_floats and library.skipjoin_floats_are_faster() else "vectors"
        self._attention = CppAttention(library)
        self.recurrent: RecurrentOps = CppRecurrent(library, self.type)
        self.path = path_of(library) + (", products in float32" if self._without_tiles == "floats" else "")
        self._way = way
        self._choices = Choices(f"{path_of(library)}-{library_id(library)}")
        self._spins = False
        self.arena = Arena()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._wide: CppOps | None = None

    def use_threads(self, count: int) -> None:
        share_between(count)
        # torch's remaining work is small, and its threads would spin on the cores of the threads that do the work.
        torch.set_num_threads(1)
        # Threads that share a core would spin at each other's expense.
        self._spins = 1 < count <= usable_cpus()

    @contextmanager
    def step(self) -> Iterator[None]:
        if not self._spins:
            yield
            return
        self.library.skipjoin_open_step()
        try:
            yield
        finally:
            self.library.skipjoin_close_step()

    def wide(self) -> CppOps:
        if self._wide is None:
            self._wide = self if self.dtype == torch.float32 else CppOps(self.library, torch.float32, self._way)
        return self._wide

    def scratch(self, m: int, k: int, threads: int) -> int:
        needed = self.library.skipjoin_scratch_bytes(self.type, m, k, threads)
        if needed > self._scratch.numel():
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def ways(self) -> tuple[str, ...]:
        return tuple(way for at, way in enumerate(WAYS) if self.library.skipjoin_has_way(self.type, at))

    def way(self, linear: CppLinear) -> str:
        ways = self.ways()
        if self._way in ways:
            return self._way
        if "tiles" not in ways:
            return self._without_tiles
        return self._choices.way(linear.shape(), (self._without_tiles, "tiles"), linear.seconds)

    def linear(self, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None) -> CppLinear:
        return CppLinear(self, weight, bias, activation)

    def grouped(
        self, matrices: Sequence[GroupedMatrix], bias: torch.Tensor | None, activation: str | None = None
    ) -> GroupedLinear:
        return GroupedLinear(self, matrices, bias, activation)

    def experts(
        self, up: Sequence[Linear], down: Sequence[Linear], per_row: int, *, among: bool, scale: float = 1.0
    ) -> Experts:
        ups, downs = _fusible(up), _fusible(down)
        if len(ups) < len(up) or len(downs) < len(down):  # inputs in another order
            return LoopedExperts(up, down, per_row, among=among, scale=scale)
        return CppExperts(ups, downs, per_row, among=among, scale=scale)

    def head_weights(self, query: HeadNorm, key: HeadNorm) -> HeadWeights | None:
        return None

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> Norm:
        return CppRMSNorm(self, weight, eps, offset)

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        return CppLayerNorm(self, width, weight, bias, eps)

    def attend_whole(self, heads: Heads, batch: PackedBatch, how: WholeText) -> torch.Tensor:
        return self._attention.attend_whole(heads, batch, how)

    def fused(self, layers: Sequence[LayerParts], norm: Norm | None, attention: AttentionBackend) -> FusedLayers | None:
        adapted = [product for layer in layers for product in products_of(layer)]
        layers = [without_adapters(layer) for layer in layers]
        calls = [call for call in map(_layer_call, layers) if call is not None]
        if attention.name != self.name or len(calls) < len(layers) or not isinstance(norm, CppRMSNorm | None):
            return None
        if len({shape_of(parts, call) for parts, call in zip(layers, calls, strict=True)}) > 1:
            return None
        if norm is not None and norm.offset != calls[0].offset:
            return None
        final = None if norm is None else norm.weight
        return CppLayers(self.library, self.type, self.scratch, layers, calls, final_norm=final, adapted=adapted)


class CppRMSNorm(TorchRMSNorm):
    def __init__(self, ops: CppOps, weight: torch.Tensor, eps: float, offset: float) -> None:
        super().__init__(weight, eps, offset)
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        self._ops.library.skipjoin_rms_norm(
            self._ops.type, x.data_ptr(), x.shape[0], x.stride(0), inner, inner_stride, x.shape[-1],
            self.weight.data_ptr(), self.eps, self.offset, out.data_ptr(), threads_here(),
        )  # fmt: skip
        return out


class CppLayerNorm(TorchLayerNorm):
    def __init__(
        self, ops: CppOps, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> None:
        super().__init__(width, weight, bias, eps)
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return super().__call__(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._ops.library.skipjoin_layer_norm(
            self._ops.type, x.data_ptr(), len(x), x.stride(0), x.shape[1], address(self.weight), address(self.bias),
            self.eps, out.data_ptr(), threads_here(),
        )  # fmt: skip
        return out


class CppLinear(CompiledLinear):
    def __init__(self, ops: CppOps, weight: Matrices, bias: torch.Tensor | None, activation: str | None) -> None:
        parts = [part.contiguous() for part in ([weight] if isinstance(weight, torch.Tensor) else weight)]
        outputs, inputs, count = sum(map(len, parts)), parts[0].shape[1], len(parts)
        super().__init__(ops, outputs, inputs, activation)
        panel = ops.library.skipjoin_panel()
        packed_bytes = ops.library.skipjoin_packed_bytes(ops.type, outputs, inputs, self.is_gated)
        self._packed = ops.arena.take(packed_bytes)
        ops.library.skipjoin_pack_weights(
            ops.type, (_P * count)(*(part.data_ptr() for part in parts)), (_I * count)(*map(len, parts)), outputs,
            inputs, self.is_gated, self._packed.data_ptr(), threads_here(),
        )  # fmt: skip
        self._bias = None if bias is None else _in_panels(bias.float(), self.is_gated, panel)
        self.weight_bytes = packed_bytes + (0 if self._bias is None else self._bias.nbytes)
        self.use(weights=self._packed.data_ptr(), bias=address(self._bias))
        self.use(way=WAYS.index(ops.way(self)))

    def shape(self) -> str:
        gated, dtype = " gated" * self.is_gated, str(self.ops.dtype).removeprefix("torch.")
        return f"{self.outputs} x {self.inputs}{gated}, {dtype}, threads {threads_here()}"

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.empty((len(ids), self.inputs), dtype=self.ops.dtype)
        check_ids(ids, self.outputs)
        self.ops.library.skipjoin_panel_rows(
            self.ops.type, self._packed.data_ptr(), self.inputs, ids.contiguous().data_ptr(), len(ids),
            found.data_ptr(), threads_here(),
        )  # fmt: skip
        return found

    def seconds(self, way: str, rows: int) -> float:
        self.use(way=WAYS.index(way))
        x = torch.ones(rows, self.inputs, dtype=self.ops.dtype)
        begin = time.perf_counter()
        self(x)
        return time.perf_counter() - begin


def _fusible(linears: Sequence[object]) -> list[CompiledLinear]:
    return [linear for linear in linears if isinstance(linear, CompiledLinear) and linear.is_fusible]


def _layer_call(parts: LayerParts) -> LayerCall | None:
    attention = parts.attention
    experts = parts.down if isinstance(parts.down, CppExperts) else None
    output, after_attention = _apart(attention.output)
    down, after_mlp = _apart(parts.down)
    norms = [parts.norm, parts.mlp_norm, after_attention, after_mlp, *(attention.qk_norms or (None, None))]
    linears = [attention.qkv, output, parts.up, *([down] if experts is None else [])]
    compiled_norms = [norm for norm in norms if isinstance(norm, CppRMSNorm)]
    compiled = _fusible(linears)
    is_whole = len(compiled_norms) == len([norm for norm in norms if norm is not None]) and len(compiled) == len(
        linears
    )
    if not is_whole or attention.query_scales is not None:
        return None
    weights = [norm.weight.data_ptr() if isinstance(norm, CppRMSNorm) else None for norm in norms]
    pairs = 0 if attention.cos_sin is None else attention.cos_sin.shape[1] // 2
    calls = [*(linear.call() for linear in compiled), *([] if experts is None else [LinearCall()])]
    return LayerCall(
        *calls, *weights, address(attention.cos_sin),
        pairs, attention.window, compiled_norms[0].eps, compiled_norms[0].offset, address(attention.sinks),
        None if experts is None else ctypes.pointer(experts.fixed),
    )  # fmt: skip


def _apart(linear: Linear | Experts) -> tuple[Linear | Experts, Callable[[torch.Tensor], torch.Tensor] | None]:
    return (linear.linear, linear.adjust) if isinstance(linear, Adjusted) else (linear, None)


def _in_panels(bias: torch.Tensor, gated: bool, panel: int) -> torch.Tensor:
    if not gated:
        return torch.nn.functional.pad(bias, (0, -len(bias) % panel))
    half = panel // 2
    halves = torch.nn.functional.pad(bias.view(2, -1), (0, -(len(bias) // 2) % half))
    return halves.view(2, -1, half).transpose(0, 1).flatten()
