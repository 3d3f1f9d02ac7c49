from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import HeadWeights
from skipjoin.model.kernels.activations import bias_and_activation, gate_and_mul
from skipjoin.model.kernels.experts import Blocks, expert_product, weighted_sum
from skipjoin.model.kernels.norms import MAX_WIDTH, normalize
from skipjoin.model.kernels.products import product
from skipjoin.model.kernels.rounding import round_rows
from skipjoin.model.ops.base import GATES, Experts, HeadNorm, Linear, Matrices, Norm, Routed
from skipjoin.model.ops.experts import LoopedExperts, route
from skipjoin.model.ops.scaled import ScaledLinear
from skipjoin.model.ops.torch_ops import TorchLinear, TorchOps, joined


class TritonOps(TorchOps):
    name = path = "triton"

    def linear(self, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None) -> TorchLinear:
        return TritonLinear(joined(weight), bias, activation)

    def experts(
        self, up: Sequence[Linear], down: Sequence[Linear], per_row: int, *, among: bool, scale: float = 1.0
    ) -> Experts:
        ups = [linear for linear in up if isinstance(linear, TorchLinear)]
        downs = [linear for linear in down if isinstance(linear, TorchLinear)]
        if len(ups) < len(up) or len(downs) < len(down):
            return LoopedExperts(up, down, per_row, among=among, scale=scale)
        return TritonExperts(ups, downs, per_row, among=among, scale=scale)

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> Norm:
        if weight.numel() > MAX_WIDTH:
            return super().rms_norm(weight, eps, offset)
        return TritonNorm(weight, None, eps, centre=False, offset=offset)

    def head_weights(self, query: HeadNorm, key: HeadNorm) -> HeadWeights | None:
        if not (isinstance(query, TritonNorm) and isinstance(key, TritonNorm)):
            return None
        return query.with_key(key)

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        if width > MAX_WIDTH:
            return super().layer_norm(width, weight, bias, eps)
        return TritonNorm(weight, bias, eps, centre=True)


class TritonLinear(TorchLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._finished(x, None)

    def shifted(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return self._finished(x, delta)

    def _finished(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        has_gate = self.activation in GATES
        found = self.product(x) if has_gate or self.activation is None else self.unbiased(x)
        if delta is not None:
            found.add_(delta)
        if self.activation is None:
            return found
        if self.activation in GATES:
            return gate_and_mul(found, GATES[self.activation])
        return bias_and_activation(found, self.bias, self.activation)

    def unbiased(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class TritonScaled(ScaledLinear, TritonLinear):
    def rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return round_rows(x)


class TritonExperts:
    def __init__(
        self, up: Sequence[TorchLinear], down: Sequence[TorchLinear], per_row: int, *, among: bool, scale: float
    ) -> None:
        self._up, self._down = _stacked(up), _stacked(down)
        self._gate = GATES[up[0].activation or ""]
        self._experts, self._per_row, self._among, self._scale = len(up), per_row, among, scale

    def route(self, logits: torch.Tensor) -> Routed:
        return route(logits, self._per_row, among=self._among, scale=self._scale)

    def add_to(self, x: torch.Tensor, routed: Routed, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        slots, blocks = routed.chosen.numel(), Blocks.of(routed.chosen, self._experts)
        inner = gate_and_mul(expert_product(x, *self._up, blocks, slots, self._per_row), self._gate)
        found = weighted_sum(expert_product(inner, *self._down, blocks, slots, 1), routed.shares)
        return total.add_(found) if then is None else then.after(found, total)


def _stacked(linears: Sequence[TorchLinear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return torch.stack([linear.weight for linear in linears]), torch.stack(biases) if biases else None


class TritonNorm:
    def __init__(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, *, centre: bool, offset: float = 0.0
    ) -> None:
        self._weight, self._bias, self._eps, self._centre, self._offset = weight, bias, eps, centre, offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalized(x, None)

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return self._normalized(total, product)

    def with_key(self, key: TritonNorm) -> HeadWeights | None:
        settings = [(norm._eps, norm._offset, norm._centre, norm._bias) for norm in (self, key)]
        if settings[0] != settings[1] or self._centre or self._bias is not None:
            return None
        if self._weight is None or key._weight is None:
            return None
        return HeadWeights(self._weight, key._weight, self._eps, self._offset)

    def _normalized(self, x: torch.Tensor, product: torch.Tensor | None) -> torch.Tensor:
        return normalize(
            x, self._weight, self._bias, self._eps, centre=self._centre, offset=self._offset, product=product
        )


class InvariantOps(TritonOps):
    def linear(self, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None) -> TorchLinear:
        return InvariantLinear(joined(weight), bias, activation)


class InvariantLinear(TritonLinear):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias)

    def unbiased(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, None)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        found = self.product(x)
        return total.add_(found) if then is None else then.after(found, total)
