from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch

from skipjoin.model.adapters import AdaptedLinear
from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.builder import Builder
from skipjoin.model.modules import Adjusted
from skipjoin.model.ops.base import Experts, FusedLayers, LayerParts, Linear, Norm
from skipjoin.model.self_attention import SelfAttention


class Layer(Protocol):
    norm: Norm

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        """Add this layer's output to `x` in place, given `norm(x)`. Return `then(x)`, or `x` without `then`."""
        ...


@runtime_checkable
class FusibleLayer(Layer, Protocol):
    @property
    def parts(self) -> LayerParts: ...


class SequentialLayer:
    def __init__(self, norm: Norm, attention: SelfAttention, mlp_norm: Norm, up: Linear, down: Linear) -> None:
        self.norm = norm
        self._attention, self._mlp_norm, self._up, self._down = attention, mlp_norm, up, down

    @property
    def parts(self) -> LayerParts:
        return LayerParts(self.norm, self._attention.parts, self._mlp_norm, self._up, self._down)

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        normed = self._attention.add_to(normed, x, step, self._mlp_norm)
        return self._down.add_to(self._up(normed), x, then)


def advance(layers: Sequence[Layer], x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
    normed = layers[0].norm(x)
    for layer, following in pairwise(layers):
        normed = layer(x, normed, step, following.norm)
    layers[-1](x, normed, step, None)
    return x


def products_of(layer: LayerParts) -> list[Linear | Experts]:
    products = [layer.attention.qkv, layer.attention.output, layer.up, layer.down]
    return [product.linear if isinstance(product, Adjusted) else product for product in products]


def without_adapters(layer: LayerParts) -> LayerParts:
    attention, down = layer.attention, layer.down
    return layer._replace(
        attention=attention._replace(qkv=_plain(attention.qkv), output=_plain(attention.output)),
        up=_plain(layer.up),
        down=_plain(down) if isinstance(down, AdaptedLinear | Adjusted) else down,
    )


def _plain(linear: Linear) -> Linear:
    if isinstance(linear, Adjusted):
        return Adjusted(_plain(linear.linear), linear.adjust)
    return linear.product if isinstance(linear, AdaptedLinear) else linear


def fused(builder: Builder, layers: Sequence[Layer], norm: Norm | None) -> FusedLayers | None:
    parts = [layer.parts for layer in layers if isinstance(layer, FusibleLayer)]
    return builder.ops.fused(parts, norm, builder.attention) if len(parts) == len(layers) else None
