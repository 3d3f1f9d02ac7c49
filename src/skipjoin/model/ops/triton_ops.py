from __future__ import annotations

import torch
import torch.nn.functional as F

from skipjoin.model.kernels.activations import bias_and_activation, gate_and_mul
from skipjoin.model.kernels.norms import MAX_WIDTH, normalize
from skipjoin.model.kernels.products import product
from skipjoin.model.ops.base import GATES, Norm
from skipjoin.model.ops.torch_ops import TorchLinear, TorchOps


class TritonOps(TorchOps):
    """torch's products (cuBLAS), with Triton kernels in between, on the current CUDA device."""

    name = path = "triton"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> TorchLinear:
        return TritonLinear(weight, bias, activation)

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> Norm:
        if weight.numel() > MAX_WIDTH:
            return super().rms_norm(weight, eps, offset)
        return TritonNorm(weight, None, eps, centre=False, offset=offset)

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        if width > MAX_WIDTH:
            return super().layer_norm(width, weight, bias, eps)
        return TritonNorm(weight, bias, eps, centre=True)


class TritonLinear(TorchLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation is None:
            return self.product(x)
        if self.activation in GATES:
            return gate_and_mul(self.product(x), GATES[self.activation])
        return bias_and_activation(self.unbiased(x), self.bias, self.activation)

    def unbiased(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class TritonNorm:
    def __init__(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, *, centre: bool, offset: float = 0.0
    ) -> None:
        self._weight, self._bias, self._eps, self._centre, self._offset = weight, bias, eps, centre, offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalized(x, None)

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return self._normalized(total, product)

    def _normalized(self, x: torch.Tensor, product: torch.Tensor | None) -> torch.Tensor:
        return normalize(
            x, self._weight, self._bias, self._eps, centre=self._centre, offset=self._offset, product=product
        )


class InvariantOps(TritonOps):
    """Batch-invariant `TritonOps`: the rows of products do not depend on the batch."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> TorchLinear:
        return InvariantLinear(weight, bias, activation)


class InvariantLinear(TritonLinear):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias)

    def unbiased(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, None)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        found = self.product(x)
        return total.add_(found) if then is None else then.after(found, total)
