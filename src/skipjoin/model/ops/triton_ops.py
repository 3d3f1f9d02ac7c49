from __future__ import annotations

import torch
import torch.nn.functional as F

from skipjoin.model.kernels.activations import bias_and_activation, silu_and_mul
from skipjoin.model.kernels.norms import MAX_WIDTH, normalize
from skipjoin.model.kernels.products import product
from skipjoin.model.ops.base import GATED, Norm
from skipjoin.model.ops.torch_ops import TorchLinear, TorchOps


class TritonOps(TorchOps):
    """torch's products (cuBLAS), with Triton kernels in between, on the current CUDA device."""

    name = path = "triton"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> TorchLinear:
        return TritonLinear(weight, bias, activation)

    def rms_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        if weight.numel() > MAX_WIDTH:
            return super().rms_norm(weight, eps)
        return TritonNorm(weight, None, eps, centre=False)

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        if width > MAX_WIDTH:
            return super().layer_norm(width, weight, bias, eps)
        return TritonNorm(weight, bias, eps, centre=True)


class TritonLinear(TorchLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation is None:
            return self.product(x)
        if self.activation == GATED:
            return silu_and_mul(self.product(x))
        return bias_and_activation(self.unbiased(x), self.bias, self.activation)

    def unbiased(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class TritonNorm:
    def __init__(self, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, *, centre: bool) -> None:
        self._weight, self._bias, self._eps, self._centre = weight, bias, eps, centre

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self._weight, self._bias, self._eps, centre=self._centre)

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return normalize(total, self._weight, self._bias, self._eps, centre=self._centre, product=product)


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
