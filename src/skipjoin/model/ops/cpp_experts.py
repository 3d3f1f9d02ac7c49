from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from skipjoin.model.ops.base import Norm, Routed
from skipjoin.model.ops.calls import ExpertsCall, LinearCall
from skipjoin.model.ops.compiled_linear import CompiledLinear
from skipjoin.model.ops.threads import threads_here


class CppExperts:
    """Experts in one call of compiled code, which reads the weights of chosen ones only.

    Attributes:
        fixed: The call without its inputs.
    """

    def __init__(
        self, up: Sequence[CompiledLinear], down: Sequence[CompiledLinear], per_row: int, *, among: bool, scale: float
    ) -> None:
        self._linears = (*up, *down)  # keeps the weights in memory
        self._calls = [(LinearCall * len(up))(*(one.call() for one in part)) for part in (up, down)]
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
