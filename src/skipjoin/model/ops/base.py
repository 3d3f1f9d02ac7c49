from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from skipjoin.model.attention.base import AttentionBackend, Heads, HeadWeights
from skipjoin.model.batch import PackedBatch
from skipjoin.model.groups import GroupedMatrix
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.recurrent import RecurrentOps

# Activations of weights [2 * out, in], gate before up: silu(gate) * up, with gelu_tanh, or gpt-oss's, with clamps.
GATED, GATED_GELU, CLAMPED = "silu_and_mul", "gelu_tanh_and_mul", "clamped_silu_and_mul"
# The function of the gate.
GATES = {GATED: "silu", GATED_GELU: "gelu_tanh", CLAMPED: "clamped"}
CLAMPED_LIMIT, CLAMPED_SLOPE = 7.0, 1.702


class Norm(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """Add `product` to `total` in place and return the norm of the sum. All are contiguous."""
        ...


# A matrix [out, in], or several whose rows follow each other.
Matrices = torch.Tensor | Sequence[torch.Tensor]

# Normalizes queries or keys, [n, heads, dim]; contiguous in the last dimension.
HeadNorm = Callable[[torch.Tensor], torch.Tensor]


class Linear(Protocol):
    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        """Add the plain product to contiguous `total`. Return `then(total)`, or `total` without `then`."""
        ...


class Product(Linear, Protocol):
    def shifted(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class LookedUp(Product, Protocol):
    def rows(self, ids: torch.Tensor) -> torch.Tensor: ...


class Routed(NamedTuple):
    chosen: torch.Tensor
    shares: torch.Tensor


class Experts(Protocol):
    """MLPs of which each row uses some, independently of other rows where products are independent."""

    def route(self, logits: torch.Tensor) -> Routed: ...

    def add_to(
        self, x: torch.Tensor, routed: Routed, total: torch.Tensor, then: Norm | None = None
    ) -> torch.Tensor: ...


class AttentionParts(NamedTuple):
    """Parts of attention; norms of queries and keys that `attend` takes are in `head_weights` too."""

    qkv: Linear
    output: Linear
    qk_norms: tuple[HeadNorm, HeadNorm] | None
    head_weights: HeadWeights | None
    heads: int
    kv_heads: int
    dim: int
    layer: int
    scale: float
    window: int
    cap: float
    sinks: torch.Tensor | None
    cos_sin: torch.Tensor | None
    query_scales: torch.Tensor | None


class LayerParts(NamedTuple):
    norm: Norm
    attention: AttentionParts
    mlp_norm: Norm
    up: Linear
    down: Linear | Experts


# Adds the output of all layers to [T, hidden] in place, normalizes the sum and returns it.
FusedLayers = Callable[[torch.Tensor, PackedBatch, PagedKV], torch.Tensor]


class WholeText(NamedTuple):
    """How all tokens of a text attend to each other; `cos_sin` is as of `AttentionBackend.attend`.

    Attributes:
        window: Largest distance between a token and one that it attends to; 0 for any.
        by_distance: Result of the function `by_distance`.
    """

    scale: float
    window: int = 0
    cos_sin: torch.Tensor | None = None
    by_distance: torch.Tensor | None = None


# Lanes of queries that a compiled operation reads at once, at most.
_MAX_LANES = 64


def by_distance(added: torch.Tensor, scale: float) -> torch.Tensor:
    """Return float32 [heads, 2 * positions - 1 + lanes] for `WholeText`, of what is added to scores.

    `added` has that of query i and key j at [heads, positions - 1 + i - j].
    """
    return torch.nn.functional.pad(added.float() / scale, (0, _MAX_LANES))


def longest(by_distance: torch.Tensor) -> int:
    return (by_distance.shape[1] - _MAX_LANES + 1) // 2


class LayerOps(Protocol):
    """Operations on [tokens, features]. Inputs are not changed unless stated."""

    name: str
    # Instruction set and product type of compiled operations; the name of others.
    path: str
    # Whether `grouped` works.
    reads_codes: bool
    recurrent: RecurrentOps

    def use_threads(self, count: int) -> None: ...

    def step(self) -> AbstractContextManager[None]: ...

    def wide(self) -> LayerOps:
        """Return the operations for float32."""
        ...

    def head_weights(self, query: HeadNorm, key: HeadNorm) -> HeadWeights | None:
        """Return the norms for attention to apply, or None where it is no faster than a call of each."""
        ...

    def linear(self, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None) -> Product:
        """Prepare [out, in] weights, which it may keep, with an activation after the bias (ALISE section 3.3)."""
        ...

    def grouped(
        self, matrices: Sequence[GroupedMatrix], bias: torch.Tensor | None, activation: str | None = None
    ) -> LookedUp: ...

    def experts(
        self, up: Sequence[Linear], down: Sequence[Linear], per_row: int, *, among: bool, scale: float = 1.0
    ) -> Experts:
        """Prepare MLPs; with `among`, shares are the softmax over the chosen logits, else over all, times `scale`."""
        ...

    def rms_norm(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> Norm: ...

    def layer_norm(self, width: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> Norm: ...

    def attend_whole(self, heads: Heads, batch: PackedBatch, how: WholeText) -> torch.Tensor:
        """Attend from every token of a segment to every other; return [T, heads * head_dim].

        Queries and keys may be rotated in place. A row's bits do not depend on other segments.
        """
        ...

    def fused(self, layers: Sequence[LayerParts], norm: Norm | None, attention: AttentionBackend) -> FusedLayers | None:
        """Return a function with the bits of these layers and then `norm`, or None if that gains nothing."""
        ...
