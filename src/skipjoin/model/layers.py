from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.frequencies import inverse_frequencies
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.base import AttentionParts, FusedLayers, LayerOps, LayerParts, Linear, LookedUp, Norm
from skipjoin.model.parallel import Group
from skipjoin.model.weights import Matrix, Weights


@dataclass(slots=True)
class LayerInputs:
    batch: PackedBatch
    kv: PagedKV
    attention: AttentionBackend


class Builder:
    def __init__(
        self, config: ModelConfig, weights: Weights, ops: LayerOps, attention: AttentionBackend, group: Group
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.attention = attention
        self.group = group
        self.shard = group.shard
        self.weight_bytes = self.parameters = 0

    def tensor(self, name: str, *shape: int, rows: range | None = None) -> torch.Tensor:
        taken = self.weights.take(name, *shape, rows=rows)
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
        activation: str | None = None,
    ) -> Linear:
        """Fuse matrices with the same input; `outs` are their rows as a whole, and `rows` this rank's (Megatron)."""
        names = [names] if isinstance(names, str) else names
        matrices = [Matrix(*one) for one in zip(names, outs, rows or map(range, outs), strict=True)]
        self.parameters += sum(len(one.rows) for one in matrices) * inputs
        return self._counted(self.weights.linear(self.ops, matrices, inputs, bias=bias, activation=activation))

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
        linear = self._counted(self.weights.linear(self.ops, matrices, inputs, bias=has_bias, columns=columns))
        return SummedLinear(linear, self.group, begins, ends) if self.shard.tp_size > 1 else linear

    def mlp(self, up: str | Sequence[str], down: str, activation: str, *, begins: bool = True) -> tuple[Linear, Linear]:
        config, own = self.config, self.shard.columns(self.config)
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        names = [up] if isinstance(up, str) else up
        sizes, rows = [width] * len(names), [own] * len(names)
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
        self.weight_bytes += table.nbytes if isinstance(table, torch.Tensor) else table.weight_bytes
        self.parameters += len(own) * config.embed_dim
        return Embedding(table, own, config.vocab_size, self.group)

    def rms_norm(self, name: str, width: int) -> Norm:
        return self.ops.rms_norm(self.tensor(f"{name}.weight", width), self.config.norm_eps)

    def layer_norm(self, name: str) -> Norm:
        width, weight, bias = self.config.hidden_size, None, None
        if self.config.norm_affine:
            weight, bias = self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width)
        return self.ops.layer_norm(width, weight, bias, self.config.norm_eps)


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


class Embedding:
    """Vocabulary-parallel embedding: a rank has the rows `own`."""

    def __init__(self, table: torch.Tensor | LookedUp, own: range, vocab_size: int, group: Group) -> None:
        self.table = table
        self._own, self._vocab_size, self._group = own, vocab_size, group

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
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
    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        assert config.rope is not None
        positions = torch.arange(config.max_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(config.rope)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * config.rope.attention_factor
        self.cos_sin = table.to(device)


class SelfAttention:
    def __init__(
        self,
        builder: Builder,
        layer: int,
        qkv: Linear,
        output: Linear,
        *,
        rotary: Rotary | None = None,
        norms: tuple[Norm, Norm] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        config, shard = builder.config, builder.shard
        self.parts = AttentionParts(
            qkv,
            output,
            norms,
            len(shard.heads(config)),
            len(shard.kv_heads(config)),
            config.head_dim,
            layer - shard.layers(config).start,  # the cache holds this rank's layers only
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            config.windows[layer],
            config.attention_cap,
            sinks,
            None if rotary is None else rotary.cos_sin,
        )

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        """Add the attention over `x` to `total`; return as `Linear.add_to` does."""
        of = self.parts
        qkv = of.qkv(x).view(-1, of.heads + 2 * of.kv_heads, of.dim)
        query, key, value = qkv.split([of.heads, of.kv_heads, of.kv_heads], dim=1)
        if of.qk_norms is not None:
            query, key = of.qk_norms[0](query), of.qk_norms[1](key)
        attended = step.attention.attend(
            query, key, value, step.kv, step.batch,
            layer=of.layer, scale=of.scale, window=of.window, cap=of.cap, sinks=of.sinks, cos_sin=of.cos_sin,
        )  # fmt: skip
        return of.output.add_to(attended, total, then)


def separate_attention(
    builder: Builder,
    layer: int,
    name: str,
    output: str,
    *,
    rotary: Rotary | None = None,
    norms: tuple[Norm, Norm] | None = None,
    sinks: torch.Tensor | None = None,
) -> SelfAttention:
    """Return attention whose projections are `name`.q_proj, k_proj and v_proj, and `name`.`output`."""
    config, shard = builder.config, builder.shard
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    own_q, own_kv = shard.query_rows(config), shard.kv_rows(config)
    projections = [f"{name}.{part}_proj" for part in "qkv"]
    return SelfAttention(
        builder,
        layer,
        builder.linear(projections, (q, kv, kv), hidden, config.attention_bias, rows=(own_q, own_kv, own_kv)),
        builder.summed_linear(f"{name}.{output}", hidden, q, config.output_bias, columns=own_q),
        rotary=rotary,
        norms=norms,
        sinks=sinks,
    )


class Layer(Protocol):
    """Layer with pre-normalized sublayers on a residual stream, of which the first reads `norm`."""

    norm: Norm

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        """Add this layer's output to `x` in place; `normed` is `norm(x)`. Return `then(x)`, or `x` without `then`."""
        ...


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


def fused(builder: Builder, layers: Sequence[Layer], norm: Norm | None) -> FusedLayers | None:
    """Return `advance` and then `norm` in one call, or None if the operations cannot do that."""
    parts = [layer.parts for layer in layers if isinstance(layer, SequentialLayer)]
    return builder.ops.fused(parts, norm, builder.attention) if len(parts) == len(layers) else None
