from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import AttentionBackend, Heads, HeadWeights
from skipjoin.model.attention.torch_backend import rotate
from skipjoin.model.batch import PackedBatch
from skipjoin.model.groups import GroupedMatrix
from skipjoin.model.ops.base import (
    CLAMPED,
    CLAMPED_LIMIT,
    CLAMPED_SLOPE,
    GATED,
    GATES,
    Experts,
    FusedLayers,
    HeadNorm,
    LayerParts,
    Linear,
    LookedUp,
    Matrices,
    Norm,
    WholeText,
    longest,
)
from skipjoin.model.ops.experts import LoopedExperts
from skipjoin.model.ops.recurrent import RecurrentOps

# Values of `ModelConfig.activation`.
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh", "relu2")


def joined(weight: Matrices) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight
    first = weight[0]
    if first.is_meta:  # torch.cat would import torch's compiler, which takes seconds
        return first.new_empty((sum(map(len, weight)), *first.shape[1:]))
    return first if len(weight) == 1 else torch.cat(list(weight))


class TorchLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> None:
        self.weight, self.bias, self.activation = weight, bias, activation
        self.weight_bytes = sum(t.nbytes for t in (weight, bias) if t is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return activated(self.activation, self.product(x))

    def shifted(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return activated(self.activation, self.product(x).add_(delta))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        if then is not None:
            return then.after(self.product(x), total)
        if self.bias is None and total.is_cuda:
            total.addmm_(x, self.weight.t())  # the product's accumulator starts with the total
        else:
            total.add_(self.product(x))
        return total


def activated(name: str | None, x: torch.Tensor) -> torch.Tensor:
    if name is None:
        return x
    if name in GATES:
        gate, up = x.chunk(2, dim=-1)
        if name == CLAMPED:
            gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
            return gate * torch.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)
        return (F.silu(gate) if name == GATED else F.gelu(gate, approximate="tanh")).mul_(up)
    if name in ("relu", "relu2"):
        found = F.relu(x, inplace=True)
        return found.square_() if name == "relu2" else found
    if name == "silu":
        return F.silu(x, inplace=True)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


class TorchRMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight, self.eps, self.offset = weight, eps, offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float() + self.offset, self.eps).to(x.dtype)

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
    reads_codes = False
    recurrent = RecurrentOps()

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wide(self) -> TorchOps:
        return self

    def linear(self, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None) -> TorchLinear:
        return TorchLinear(joined(weight), bias, activation)

    def grouped(
        self, matrices: Sequence[GroupedMatrix], bias: torch.Tensor | None, activation: str | None = None
    ) -> LookedUp:
        raise NotImplementedError

    def experts(
        self, up: Sequence[Linear], down: Sequence[Linear], per_row: int, *, among: bool, scale: float = 1.0
    ) -> Experts:
        return LoopedExperts(up, down, per_row, among=among, scale=scale)

    def head_weights(self, query: HeadNorm, key: HeadNorm) -> HeadWeights | None:
        return None

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> Norm:
        return TorchRMSNorm(weight, eps, offset)

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm:
        return TorchLayerNorm(width, weight, bias, eps)

    def attend_whole(self, heads: Heads, batch: PackedBatch, how: WholeText) -> torch.Tensor:
        return attend_whole(heads, batch, how)

    def fused(self, layers: Sequence[LayerParts], norm: Norm | None, attention: AttentionBackend) -> FusedLayers | None:
        return None


# Queries that attend to a window at once, each to this and the width of the window.
_QUERIES = 256


def attend_whole(heads: Heads, batch: PackedBatch, how: WholeText) -> torch.Tensor:
    query = heads.query
    if how.cos_sin is not None:
        rotate(query, heads.key, batch.positions, how.cos_sin)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    each = zip(*(part.split(batch.lengths) for part in (*heads, output)), strict=True)
    masks = {length: _mask(how, length, query.dtype) for length in set(batch.lengths)}
    for *inputs, out in each:
        qkv = q, k, v = [part.transpose(0, 1)[None] for part in inputs]
        if how.window and len(out) > how.window + 1:
            _attend_near(qkv, out, how)
            continue
        shares = q.shape[1] != k.shape[1]
        found = F.scaled_dot_product_attention(q, k, v, masks[len(out)], scale=how.scale, enable_gqa=shares)
        out.copy_(found[0].transpose(0, 1))
    return output.flatten(1)


def _mask(how: WholeText, length: int, dtype: torch.dtype) -> torch.Tensor | None:
    if how.by_distance is None:
        return None
    at = torch.arange(length, device=how.by_distance.device)
    return (how.by_distance[:, at[:, None] - at[None] + longest(how.by_distance) - 1] * how.scale).to(dtype)


def _attend_near(qkv: Sequence[torch.Tensor], out: torch.Tensor, how: WholeText) -> None:
    (q, k, v), length, window = qkv, len(out), how.window
    for first in range(0, length, _QUERIES):
        end, low, high = min(length, first + _QUERIES), max(0, first - window), min(length, first + _QUERIES + window)
        places = torch.arange(low, high, device=out.device)
        mask = (places[None] - torch.arange(first, end, device=out.device)[:, None]).abs() <= window
        found = F.scaled_dot_product_attention(
            q[:, :, first:end],
            k[:, :, low:high],
            v[:, :, low:high],
            mask,
            scale=how.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out[first:end].copy_(found[0].transpose(0, 1))
