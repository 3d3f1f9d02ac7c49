from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.ops.base import FusedLayers, LayerParts, Linear, Norm

# Values of `ModelConfig.activation`.
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")


class TorchLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.weight_bytes = sum(t.nbytes for t in (weight, bias) if t is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        if then is not None:
            return then.after(F.linear(x, self.weight, self.bias), total)
        if self.bias is None and total.is_cuda:
            total.addmm_(x, self.weight.t())  # the product's accumulator starts with the total
        else:
            total.add_(F.linear(x, self.weight, self.bias))
        return total


class TorchActivatedLinear(TorchLinear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        super().__init__(weight, bias)
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return activated(self.activation, super().__call__(x))


def activated(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "relu":
        return F.relu(x, inplace=True)
    if name == "silu":
        return F.silu(x, inplace=True)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class TorchGatedLinear(TorchLinear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = super().__call__(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class TorchRMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return self(total.add_(product))


class TorchLayerNorm:
    def __init__(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
        self.shape, self.weight, self.bias, self.eps = (width,), weight, bias, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return self(total.add_(product))


class TorchOps:
    name = path = "torch"

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> TorchLinear:
        return TorchLinear(weight, bias) if activation is None else TorchActivatedLinear(weight, bias, activation)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return TorchGatedLinear(weight, bias)

    def rms_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return TorchRMSNorm(weight, eps)

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        return TorchLayerNorm(width, weight, bias, eps)

    def fused(self, layers: Sequence[LayerParts], norm: Norm | None, attention: AttentionBackend) -> FusedLayers | None:
        return None
