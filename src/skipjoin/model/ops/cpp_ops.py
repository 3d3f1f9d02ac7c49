from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float, c_int64, c_void_p

import torch

from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.large_pages import Arena
from skipjoin.model.ops.base import GATED, FusedLayers, LayerParts, Norm
from skipjoin.model.ops.build import library_id, path_of
from skipjoin.model.ops.calls import LayerCall, LinearCall, check_sizes
from skipjoin.model.ops.choice import WAYS, Choices
from skipjoin.model.ops.cpp_layers import CppLayers, shape_of
from skipjoin.model.ops.threads import share_between, threads_here
from skipjoin.model.ops.torch_ops import ACTIVATIONS, TorchLayerNorm, TorchRMSNorm
from skipjoin.system.container import usable_cpus

# In the order of `Type` in layer_ops.cpp.
CPP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# In the order of `Activation` in layer_ops.cpp.
_ACTIVATIONS = (None, *ACTIVATIONS)

_I, _P = c_int64, c_void_p

_SIGNATURES = {
    "skipjoin_has_float16": ([], c_int64),
    "skipjoin_panel": ([], c_int64),
    "skipjoin_has_way": ([_I, _I, _I], c_int64),
    "skipjoin_floats_are_faster": ([], c_int64),
    "skipjoin_scratch_bytes": ([_I] * 4, c_int64),
    "skipjoin_packed_bytes": ([_I] * 5, c_int64),
    "skipjoin_pack_weights": ([_I, _P, _I, _I, _I, _P, _P, _I], None),
    "skipjoin_open_step": ([], None),
    "skipjoin_close_step": ([], None),
    "skipjoin_linear": ([_I, ctypes.POINTER(LinearCall)], None),
    "skipjoin_rms_norm": ([_I, _P, _I, _I, _I, _I, _I, _P, c_float, _P, _I], None),
}


def has_dtype(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    return dtype != torch.float16 or bool(library.skipjoin_has_float16())


class CppOps:
    """Compiled layer operations; `way` None takes the fastest. Not thread-safe: products share one scratch buffer."""

    name = "cpp"

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, way: str | None = None) -> None:
        for name, (arguments, result) in _SIGNATURES.items():
            getattr(library, name).argtypes = arguments
            getattr(library, name).restype = result
        check_sizes(library, {"skipjoin_linear_bytes": LinearCall})
        self.library = library
        self.type = CPP_DTYPES.index(dtype)
        has_floats = "floats" in self.ways()
        self._without_tiles = "floats" if has_floats and library.skipjoin_floats_are_faster() else "vectors"
        self.path = path_of(library) + (", products in float32" if self._without_tiles == "floats" else "")
        self._way = way
        self._choices = Choices(f"{path_of(library)}-{library_id(library)}")
        self._spins = False
        self.arena = Arena()
        self._scratch = torch.empty(0, dtype=torch.uint8)

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

    def scratch(self, m: int, k: int, threads: int) -> int:
        needed = self.library.skipjoin_scratch_bytes(self.type, m, k, threads)
        if needed > self._scratch.numel():
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def ways(self, *, is_int8: bool = False) -> tuple[str, ...]:
        return tuple(way for at, way in enumerate(WAYS) if self.library.skipjoin_has_way(self.type, int(is_int8), at))

    def way(self, linear: CppLinear) -> str:
        ways = self.ways(is_int8=linear.is_int8)
        if self._way in ways:
            return self._way
        if "tiles" not in ways:
            return self._without_tiles
        return self._choices.way(linear.shape(), (self._without_tiles, "tiles"), linear.seconds)

    def linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None = None,
        *,
        is_int8: bool = False,
    ) -> CppLinear:
        return CppLinear(self, weight, bias, activation, is_int8=is_int8)

    def rms_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return CppRMSNorm(self, weight, eps)

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        return TorchLayerNorm(width, weight, bias, eps)

    def fused(self, layers: Sequence[LayerParts], norm: Norm | None, attention: AttentionBackend) -> FusedLayers | None:
        calls = [call for call in map(_layer_call, layers) if call is not None]
        if attention.name != self.name or len(calls) < len(layers) or not isinstance(norm, CppRMSNorm | None):
            return None
        if len({shape_of(parts, call) for parts, call in zip(layers, calls, strict=True)}) > 1:
            return None
        final = None if norm is None else norm.weight
        return CppLayers(self.library, self.type, self.scratch, layers, calls, final_norm=final)


class CppRMSNorm(TorchRMSNorm):
    def __init__(self, ops: CppOps, weight: torch.Tensor, eps: float) -> None:
        super().__init__(weight, eps)
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        self._ops.library.skipjoin_rms_norm(
            self._ops.type, x.data_ptr(), x.shape[0], x.stride(0), inner, inner_stride, x.shape[-1],
            self.weight.data_ptr(), self.eps, out.data_ptr(), threads_here(),
        )  # fmt: skip
        return out


class CppLinear:
    """Weights in panels of outputs, each read once per product; int8 ones are round(weight / scale), per output."""

    def __init__(
        self,
        ops: CppOps,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        *,
        is_int8: bool,
    ) -> None:
        gated = activation == GATED
        self._ops, self._gated = ops, int(gated)
        self._activation = 0 if gated else _ACTIVATIONS.index(activation)
        self._n, self._k = weight.shape
        self.is_int8, panel = is_int8, ops.library.skipjoin_panel()
        packed_bytes = ops.library.skipjoin_packed_bytes(ops.type, self._n, self._k, self._gated, int(is_int8))
        self._packed = ops.arena.take(packed_bytes)
        zeros = torch.zeros(self._n)
        self._scales = _in_panels(zeros, gated, panel) if is_int8 else None
        weight = weight.contiguous()
        ops.library.skipjoin_pack_weights(
            ops.type, weight.data_ptr(), self._n, self._k, self._gated, self._packed.data_ptr(),
            _address(self._scales), threads_here(),
        )  # fmt: skip
        self._bias = None if bias is None else _in_panels(bias.float(), gated, panel)
        self.weight_bytes = packed_bytes + sum(x.nbytes for x in (self._bias, self._scales) if x is not None)
        self._arguments = self._packed.data_ptr(), _address(self._bias), _address(self._scales), self._n, self._k
        self._dtype, self._way = weight.dtype, 0
        self._way = WAYS.index(ops.way(self))

    def shape(self) -> str:
        gated = " gated" * self._gated
        return f"{self._n} x {self._k}{gated}, {str(self._dtype).removeprefix('torch.')}, threads {threads_here()}"

    def seconds(self, way: str, rows: int) -> float:
        before, self._way = self._way, WAYS.index(way)
        x = torch.ones(rows, self._k, dtype=self._dtype)
        begin = time.perf_counter()
        self(x)
        taken = time.perf_counter() - begin
        self._way = before
        return taken

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0], self._n // 2 if self._gated else self._n), dtype=x.dtype)
        self._run(x, out, 0)
        return out

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        self._run(x, total, 1)
        return total if then is None else then(total)

    def _run(self, x: torch.Tensor, out: torch.Tensor, add: int) -> None:
        ops, m, threads = self._ops, x.shape[0], threads_here()
        call = LinearCall(
            x.data_ptr(), x.stride(0), m, *self._arguments, out.data_ptr(), self._gated, add, self._activation,
            ops.scratch(m, self._k, threads), threads, self._way,
        )  # fmt: skip
        ops.library.skipjoin_linear(ops.type, call)

    def call(self) -> LinearCall:
        return LinearCall(None, 0, 0, *self._arguments, None, self._gated, 0, self._activation, None, 0, self._way)


def _layer_call(parts: LayerParts) -> LayerCall | None:
    attention = parts.attention
    norms = [parts.norm, parts.mlp_norm, *(attention.qk_norms or ())]
    linears = [attention.qkv, attention.output, parts.up, parts.down]
    compiled_norms = [norm for norm in norms if isinstance(norm, CppRMSNorm)]
    compiled = [linear for linear in linears if isinstance(linear, CppLinear)]
    if len(compiled_norms) < len(norms) or len(compiled) < len(linears):
        return None
    weights = [norm.weight.data_ptr() for norm in compiled_norms]
    pairs = 0 if attention.cos_sin is None else attention.cos_sin.shape[1] // 2
    return LayerCall(
        *(linear.call() for linear in compiled), *weights, *[None] * (4 - len(weights)), _address(attention.cos_sin),
        pairs, attention.window, compiled_norms[0].eps,
    )  # fmt: skip


def _address(values: torch.Tensor | None) -> int | None:
    return None if values is None else values.data_ptr()


def _in_panels(bias: torch.Tensor, gated: bool, panel: int) -> torch.Tensor:
    if not gated:
        return torch.nn.functional.pad(bias, (0, -len(bias) % panel))
    half = panel // 2
    halves = torch.nn.functional.pad(bias.view(2, -1), (0, -(len(bias) // 2) % half))
    return halves.view(2, -1, half).transpose(0, 1).flatten()
