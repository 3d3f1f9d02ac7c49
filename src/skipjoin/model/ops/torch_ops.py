"""Layer arithmetic in plain torch operations: the reference, and what runs on CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchLinear:
    """torch's own layout and product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.weight_bytes = sum(t.nbytes for t in (weight, bias) if t is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(F.linear(x, self.weight, self.bias))


class TorchGatedLinear(TorchLinear):
    """Gate and up projections in one product."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = super().__call__(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class TorchOps:
    """See `LayerOps`."""

    name = "torch"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TorchGatedLinear:
        return TorchGatedLinear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)
