from __future__ import annotations

import torch
import torch.nn.functional as F

from skipjoin.model.kernels.activations import bias_and_activation, silu_and_mul
from skipjoin.model.kernels.norms import MAX_WIDTH, normalize
from skipjoin.model.kernels.products import product
from skipjoin.model.ops.base import Linear, Norm
from skipjoin.model.ops.torch_ops import TorchActivatedLinear, TorchLinear, TorchOps


class TritonOps(TorchOps):
    """torch's products (cuBLAS), with Triton kernels in between, on the current CUDA device."""

    name = path = "triton"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> TorchLinear:
        return TorchLinear(weight, bias) if activation is None else TritonActivatedLinear(weight, bias, activation)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return TritonGatedLinear(weight, bias)

    def rms_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        if weight.numel() > MAX_WIDTH:
            return super().rms_norm(weight, eps)
        return TritonNorm(weight, None, eps, centre=False)

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        if width > MAX_WIDTH:
            return super().layer_norm(width, weight, bias, eps)
        return TritonNorm(weight, bias, eps, centre=True)


class TritonActivatedLinear(TorchActivatedLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return bias_and_activation(F.linear(x, self.weight), self.bias, self.activation)


class TritonGatedLinear(TorchLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(super().__call__(x))


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
        return InvariantLinear(weight, bias) if activation is None else InvariantActivated(weight, bias, activation)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return InvariantGated(weight, bias)


class InvariantLinear(TorchLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        found = product(x, self.weight, self.bias)
        if then is not None:
            return then.after(found, total)
        return total.add_(found)


class InvariantActivated(InvariantLinear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        super().__init__(weight, bias)
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return bias_and_activation(product(x, self.weight, None), self.bias, self.activation)


class InvariantGated(InvariantLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(super().__call__(x))
