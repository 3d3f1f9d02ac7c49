from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from skipjoin.model.large_pages import Arena
from skipjoin.model.ops.base import CLAMPED, GATES, Norm
from skipjoin.model.ops.calls import LinearCall
from skipjoin.model.ops.threads import threads_here
from skipjoin.model.ops.torch_ops import ACTIVATIONS

# In the order of `Activation` in outputs.inc.cpp.
_ACTIVATIONS = (None, *ACTIVATIONS, GATES[CLAMPED])


class CompiledOps(Protocol):
    library: ctypes.CDLL
    dtype: torch.dtype
    type: int
    arena: Arena

    def scratch(self, m: int, k: int, threads: int) -> int: ...


class CompiledLinear:
    weight_bytes: int
    # Whether its call alone computes the product.
    is_fusible = True

    def __init__(self, ops: CompiledOps, outputs: int, inputs: int, activation: str | None) -> None:
        self.ops, self.outputs, self.inputs = ops, outputs, inputs
        self.is_gated = activation in GATES
        self._fixed = LinearCall(
            n=outputs,
            k=inputs,
            gated=self.is_gated,
            activation=_ACTIVATIONS.index(GATES.get(activation or "", activation)),
            delta_stride=outputs,
        )

    def use(self, **fields: int | None) -> None:
        for name, value in fields.items():
            setattr(self._fixed, name, value)

    def call(self) -> LinearCall:
        return LinearCall.from_buffer_copy(self._fixed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._empty(x)
        self._run(x, out, 0)
        return out

    def shifted(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        out = self._empty(x)
        self._run(x, out, 0, delta)
        return out

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        self._run(x, total, 1)
        return total if then is None else then(total)

    def _empty(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty((x.shape[0], self.outputs // 2 if self.is_gated else self.outputs), dtype=x.dtype)

    def _run(self, x: torch.Tensor, out: torch.Tensor, add: int, delta: torch.Tensor | None = None) -> None:
        ops, rows, threads = self.ops, x.shape[0], threads_here()
        # A copy whose fields are set takes a third of the time of a call with all fields.
        call = self.call()
        call.x, call.x_stride, call.rows = x.data_ptr(), x.stride(0), rows
        call.out, call.out_stride, call.add = out.data_ptr(), out.stride(0), add
        call.scratch, call.threads = ops.scratch(rows, self.inputs, threads), threads
        if delta is not None:
            call.delta = delta.data_ptr()
        ops.library.skipjoin_linear(ops.type, call)


def check_ids(ids: torch.Tensor, outputs: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < outputs:
        raise IndexError(f"token ids must be in [0, {outputs - 1}]")
