"""The interface of a layer's operations besides attention: torch operations everywhere, compiled code on a CPU."""

from __future__ import annotations

from typing import Protocol

import torch


class Norm(Protocol):
    """A normalisation of the last dimension with its weights."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, width], or [n, heads, width] that is strided in all but the last -> the same shape, contiguous."""
        ...

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """total += product, in place; the norm of the sum. All [n, width] and contiguous."""
        ...


class Linear(Protocol):
    """A weight matrix in the layout that its implementation multiplies fastest."""

    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out] in the type of `x`."""
        ...

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor | None:
        """total += the product, in place; `total`: [n, out], contiguous. Not for gated or activated products.

        then: the norm that follows; returns its result on the sum.
        """
        ...


class LayerOps(Protocol):
    """Operations on [tokens, features]. Inputs are not changed unless stated."""

    name: str
    # What they run on: of compiled ones the instructions and what is special about products, of others their name.
    path: str
    # How weights are kept: "none" as they are, "int8" with 8 bits per weight.
    quantization: str

    def use_threads(self, count: int) -> None:
        """Use this many CPU threads for what the calling thread computes, torch's operations included."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> Linear:
        """Prepare [out, in] weights; may take ownership of the tensor. activation: a `ModelConfig.activation`, which
        follows the bias (fused as in ALISE section 3.3)."""
        ...

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Weights [2 * out, in], gate before up: the result is silu(gate) * up, [n, out]."""
        ...

    def rms_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        """By the root mean square; weight: [width]."""
        ...

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        """By mean and variance; weight, bias: [width]."""
        ...
