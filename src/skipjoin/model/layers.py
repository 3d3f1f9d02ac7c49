from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from skipjoin.model.adapters import AdaptedLinear, Adapters
from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.frequencies import inverse_frequencies
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.base import (
    AttentionParts,
    Experts,
    FusedLayers,
    HeadNorm,
    LayerOps,
    LayerParts,
    Linear,
    LookedUp,
    Norm,
)
from skipjoin.model.parallel import Group
from skipjoin.model.rope import RopeSettings
from skipjoin.model.weights import Matrix, Weights


@dataclass(slots=True)
class LayerInputs:
    batch: PackedBatch
    kv: PagedKV
    attention: AttentionBackend


class Builder:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: LayerOps,
        attention: AttentionBackend,
        group: Group,
        *,
        dtype: torch.dtype,
        adapters: Adapters,
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.attention = attention
        self.group = group
        self.shard = group.shard
        self.dtype = dtype
        self.adapters = adapters
        # Parameters are those that a token uses, and `expert_bytes` a part of `weight_bytes`.
        self.weight_bytes = self.expert_bytes = self.parameters = 0

    def tensor(self, name: str, *shape: int, rows: range | None = None) -> torch.Tensor:
        return self.counted(self.weights.take(name, *shape, rows=rows))

    def counted(self, taken: torch.Tensor) -> torch.Tensor:
        self.weight_bytes += taken.nbytes
        self.parameters += taken.numel()
        return taken

    def linear(
        self,
        names: str | Sequence[str],
        outs: Sequence[int],
        inputs: int,
        bias: bool,
        *,
        rows: Sequence[range] | None = None,
        orders: Sequence[torch.Tensor | None] | None = None,
        activation: str | None = None,
        takes_adapters: bool = True,
    ) -> Linear:
        """Fuse matrices with the same input.

        Args:
            names: Of which several may be parts of one.
            outs: Their rows as a whole.
            rows: This rank's (Megatron).
            orders: Which of these rows each output has.
            takes_adapters: The product is of all tokens of a batch.
        """
        names = [names] if isinstance(names, str) else names
        parts = zip(names, outs, rows or map(range, outs), orders or [None] * len(outs), strict=True)
        matrices = [Matrix(*part) for part in parts]
        self.parameters += sum(len(matrix.rows) for matrix in matrices) * inputs
        product = self.weights.linear(self.ops, matrices, inputs, bias=bias, activation=activation)
        if takes_adapters:
            return self._counted(self.adapters.adapted(product, matrices, inputs, None, activation))
        return self._counted(product)

    def summed_linear(
        self,
        name: str,
        out: int,
        inputs: int,
        bias: bool,
        *,
        columns: range,
        begins: bool = True,
        ends: bool = True,
    ) -> Linear:
        """Make a product with a split input (Megatron's row parallelism), summed over ranks; rank 0 adds the bias."""
        matrices = [Matrix(name, out, range(out))]
        self.parameters += out * len(columns)
        has_bias = bias and self.shard.tp_rank == 0
        product = self.weights.linear(self.ops, matrices, inputs, bias=has_bias, columns=columns)
        linear = self._counted(self.adapters.adapted(product, matrices, inputs, columns, None))
        return SummedLinear(linear, self.group, begins, ends) if self.shard.tp_size > 1 else linear

    def mlp(
        self,
        up: str | Sequence[str],
        down: str,
        activation: str,
        *,
        is_joined: bool = False,
        begins: bool = True,
    ) -> tuple[Linear, Linear]:
        """Make the products of an MLP; `is_joined` if the one matrix `up` has gate and then up."""
        config, own = self.config, self.shard.columns(self.config)
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        names = [up] if isinstance(up, str) else up
        sizes, rows = [width] * len(names), [own] * len(names)
        if is_joined:
            names, sizes = [*names, *names], [2 * width] * 2
            rows = [own, range(width + own.start, width + own.stop)]
        return (
            self.linear(names, sizes, hidden, bias, rows=rows, activation=activation),
            self.summed_linear(down, hidden, width, bias, columns=own, begins=begins),
        )

    def finish_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.parameters += weight.numel()
        return self._counted(self.weights.product(self.ops, weight, bias))

    def _counted(self, linear: Linear) -> Linear:
        self.weight_bytes += linear.weight_bytes
        return linear

    def embedding(self, name: str) -> Embedding:
        config, own = self.config, self.shard.vocabulary(self.config)
        matrix = Matrix(name.removesuffix(".weight"), config.vocab_size, own)
        table = self.weights.table(self.ops, matrix, config.embed_dim)
        if config.tie_embeddings and self.shard.is_last and config.pooling is None and isinstance(table, torch.Tensor):
            # The largest matrix is packed, and its tensor released, before the others need memory.
            output = self.weights.product(self.ops, table, None)
            table = output if isinstance(output, LookedUp) else table
        self.weight_bytes += table.nbytes if isinstance(table, torch.Tensor) else table.weight_bytes
        self.parameters += len(own) * config.embed_dim
        return Embedding(table, own, config.vocab_size, self.group, config.embedding_scale)

    def rms_norm(self, name: str, width: int | None = None) -> Norm:
        """Make a norm of `width` values, by default the hidden size."""
        weight = self.tensor(f"{name}.weight", width or self.config.hidden_size)
        return self.ops.rms_norm(weight, self.config.norm_eps, self.config.norm_offset)

    def projection_norm(self, name: str, rows: range, total: int) -> HeadNorm:
        """Make a norm over all heads of a projection with `total` rows, of which this rank has `rows`."""
        config, weight = self.config, self.tensor(f"{name}.weight", total, rows=rows)
        if len(rows) == total:
            return ProjectionNorm(self.ops.rms_norm(weight, config.norm_eps, config.norm_offset))
        return SpreadNorm(weight, config.norm_eps, len(rows) * self.shard.tp_size, self.group)

    def layer_norm(self, name: str, *, bias: bool = True) -> Norm:
        width, weight, shift = self.config.hidden_size, None, None
        if self.config.norm_affine:
            weight, shift = self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width) if bias else None
        return self.ops.layer_norm(width, weight, shift, self.config.norm_eps)


class SummedLinear:
    """`Linear` summed over a stage. Products added to one total share an all-reduce, from `begins` to `ends`."""

    def __init__(self, linear: Linear, group: Group, begins: bool, ends: bool) -> None:
        self._linear, self._group, self._begins, self._ends = linear, group, begins, ends
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self._linear(x)
        self._group.all_reduce(product)
        return product

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        if self._begins:
            self._group.count_once(total)
        self._linear.add_to(x, total)
        if self._ends:
            self._group.all_reduce(total)
        return total if then is None else then(total)


class Adjusted:
    """`Linear` whose product is normalized or scaled before it is added."""

    def __init__(self, linear: Linear, adjust: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.linear, self.adjust = linear, adjust
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.adjust(self.linear(x))

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        product = self(x)
        return total.add_(product) if then is None else then.after(product, total)


class Unchanged:
    """`Norm` in front of a part that reads the residual stream itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total.add_(product)


class ProjectionNorm:
    """Norm of [n, heads, dim] over all heads."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x.flatten(1)).view(x.shape)


class SpreadNorm:
    """Root mean square norm of [n, heads, dim] over the heads of a stage's ranks, which have `width` values."""

    def __init__(self, weight: torch.Tensor, eps: float, width: int, group: Group) -> None:
        self._weight, self._eps, self._width, self._group = weight.float(), eps, width, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values = x.flatten(1).float()
        # In float64, because the order of torch's additions may depend on the number of rows.
        squares = values.square().sum(-1, keepdim=True, dtype=torch.float64).float()
        self._group.all_reduce(squares)
        values *= (squares / self._width + self._eps).rsqrt() * self._weight
        return values.to(x.dtype).view(x.shape)


class Embedding:
    """Vocabulary-parallel embedding: a rank has the rows `own`. They are multiplied by `scale` in the model's type."""

    def __init__(
        self, table: torch.Tensor | LookedUp, own: range, vocab_size: int, group: Group, scale: float = 1.0
    ) -> None:
        self.table = table
        self._own, self._vocab_size, self._group, self._scale = own, vocab_size, group, scale

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        found = self._found(ids)
        return found if self._scale == 1 else found.mul_(torch.tensor(self._scale, dtype=found.dtype).item())

    def _found(self, ids: torch.Tensor) -> torch.Tensor:
        if len(self._own) == self._vocab_size:
            return self._rows(ids)
        if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise IndexError(f"token ids must be in [0, {self._vocab_size - 1}]")
        local = ids - self._own.start
        foreign = (local < 0) | (local >= len(self._own))
        found = self._rows(local.masked_fill_(foreign, 0)).masked_fill_(foreign[:, None], 0)
        self._group.all_reduce(found)
        return found

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.table) if isinstance(self.table, torch.Tensor) else self.table.rows(ids)


class Rotary:
    def __init__(self, rope: RopeSettings, max_positions: int, device: torch.device | str) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor
        self.cos_sin = table.to(device)
        self.query_scales: torch.Tensor | None = None
        if rope.query_beta:
            turns = torch.arange(max_positions) // rope.original_max_positions
            self.query_scales = (1 + rope.query_beta * torch.log1p(turns.float())).to(device)


class SelfAttention:
    def __init__(
        self,
        builder: Builder,
        layer: int,
        qkv: Linear,
        output: Linear,
        *,
        rotary: Rotary | None = None,
        norms: tuple[HeadNorm, HeadNorm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        config, shard = builder.config, builder.shard
        # Queries are scaled between their norm and attention.
        is_scaled = rotary is not None and rotary.query_scales is not None
        self.parts = AttentionParts(
            qkv,
            output,
            norms,
            None if norms is None or is_scaled else builder.ops.head_weights(*norms),
            len(shard.heads(config)),
            len(shard.kv_heads(config)),
            config.head_dim,
            shard.kv_layers(config).index(layer),  # the cache holds this rank's layers only
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            config.windows[layer],
            config.attention_cap,
            sinks,
            None if rotary is None else rotary.cos_sin,
            None if rotary is None else rotary.query_scales,
        )

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        """Add the attention over `x` to `total`; return as `Linear.add_to` does."""
        of = self.parts
        qkv = of.qkv(x).view(-1, of.heads + 2 * of.kv_heads, of.dim)
        query, key, value = qkv.split([of.heads, of.kv_heads, of.kv_heads], dim=1)
        if of.qk_norms is not None and of.head_weights is None:
            query, key = of.qk_norms[0](query), of.qk_norms[1](key)
        if of.query_scales is not None:
            query = query * of.query_scales[step.batch.positions, None, None].to(query.dtype)
        attended = step.attention.attend(
            query, key, value, step.kv, step.batch,
            layer=of.layer, scale=of.scale, window=of.window, cap=of.cap, sinks=of.sinks, cos_sin=of.cos_sin,
            norms=of.head_weights,
        )  # fmt: skip
        return of.output.add_to(attended, total, then)


def separate_attention(
    builder: Builder,
    layer: int,
    name: str,
    output: str,
    *,
    rotary: Rotary | None = None,
    norms: tuple[HeadNorm, HeadNorm] | None = None,
    sinks: torch.Tensor | None = None,
    adjust: Callable[[torch.Tensor], torch.Tensor] | None = None,
    joined: str = "",
    is_paired: bool = False,
    ends: bool = True,
) -> SelfAttention:
    """Return attention whose projections are `name`.q_proj, k_proj and v_proj, and `name`.`output`.

    Args:
        adjust: Changes the output before it is added; see `Adjusted`.
        joined: Name of one matrix that has the rows of all three, instead of theirs.
        is_paired: The checkpoint rotates pairs of neighbors, (0, 1), instead of (0, rotary_dim / 2).
        ends: As of `Builder.summed_linear`.
    """
    config, shard = builder.config, builder.shard
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = [shard.query_rows(config), *[shard.kv_rows(config)] * 2]
    outs, projections = (q, kv, kv), [f"{name}.{part}_proj" for part in "qkv"]
    if joined:
        outs, projections = (q + 2 * kv,) * 3, [f"{name}.{joined}"] * 3
        rows = [range(first + own.start, first + own.stop) for first, own in zip((0, q, q + kv), rows, strict=True)]
    orders = None
    if is_paired and config.rope is not None:
        orders = [*(halves_of_pairs(len(own), config.head_dim, config.rope.rotary_dim) for own in rows[:2]), None]
    product = builder.summed_linear(
        f"{name}.{output}", hidden, q, config.output_bias, columns=shard.query_rows(config), ends=ends
    )
    return SelfAttention(
        builder,
        layer,
        builder.linear(projections, outs, hidden, config.attention_bias, rows=rows, orders=orders),
        product if adjust is None else Adjusted(product, adjust),
        rotary=rotary,
        norms=norms,
        sinks=sinks,
    )


def halves_of_pairs(rows: int, dim: int, rotary_dim: int) -> torch.Tensor:
    """Return which row each row of heads has after the first of each pair come before the second."""
    pairs = torch.arange(rotary_dim).view(-1, 2).t().flatten()
    order = torch.cat([pairs, torch.arange(rotary_dim, dim)])
    return (torch.arange(0, rows, dim)[:, None] + order).flatten()


class Layer(Protocol):
    """Layer with pre-normalized sublayers on a residual stream, of which the first reads `norm`."""

    norm: Norm

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        """Add this layer's output to `x` in place; `normed` is `norm(x)`. Return `then(x)`, or `x` without `then`."""
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
    """Return a layer's products, which may take adapters."""
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
    """Return `advance` and then `norm` in one call, or None if the operations cannot do that."""
    parts = [layer.parts for layer in layers if isinstance(layer, FusibleLayer)]
    return builder.ops.fused(parts, norm, builder.attention) if len(parts) == len(layers) else None
