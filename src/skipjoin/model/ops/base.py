"""The arithmetic of a layer besides attention, as a seam: plain torch everywhere, compiled code on a CPU."""

from __future__ import annotations

from typing import Protocol

import torch


class Linear(Protocol):
    """A matrix held in whatever layout its owner multiplies fastest."""

    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out] in the type of `x`."""
        ...

    def add_to(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """total += the product, in place; `total`: [n, out], contiguous. Not for gated ones."""
        ...


class LayerOps(Protocol):
    """Operations on [tokens, features]. Inputs are not changed unless said."""

    name: str

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Prepare [out, in] weights; may take the tensor over."""
        ...

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Weights [2 * out, in], gate before up: the result is silu(gate) * up, [n, out]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the last dimension by its root mean square; `x` may be strided in the others."""
        ...
