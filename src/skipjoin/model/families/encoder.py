"""Parts of encoders, whose tokens attend to all tokens of their text, or of a window around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import AttentionBackend, Call, Heads
from skipjoin.model.attention.torch_backend import rotate
from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.layers import Builder, Embedding, LayerInputs, Rotary
from skipjoin.model.ops.base import GATES, Linear, Norm

# Queries that attend to a window at once, each to this and the width of the window.
_QUERIES = 256
_GATED = {function: name for name, function in GATES.items()}
# Returns what is added to the scores of a text of that length, [heads, length, length].
Bias = Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of an encoder's tensors, after its prefix, and in a layer after that of the layer.

    Attributes:
        layer: With the place of the number.
        qkv: Three names, or one of a matrix that has all.
        attention_norm: Of the residual after the attention, or before it if `norm_before`. So is `mlp_norm`.
        up: One name without a gate; gate and up; or one of a matrix that has both if `is_joined`, up first if
            `has_up_first`.
        has_down_bias: The last product has a bias where `mlp_bias` says that the first has none.
    """

    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"
    projection: str = "embeddings_project"
    layer: str = "encoder.layer.{}"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""
    is_joined: bool = False
    has_up_first: bool = False
    has_down_bias: bool = False


class Encoder:
    """Encoder whose tensors begin with `PREFIX`."""

    PREFIX: str
    EMBEDDING: str
    LAYOUT = Layout()
    OUTPUT = ""

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        config, shard, names = builder.config, builder.shard, self.LAYOUT
        self.embedding: Embedding | None = None
        self._positions = self._types = self._projection = None
        if shard.is_first:
            self.embedding = builder.embedding(self.EMBEDDING)
            self._offset = config.position_offset
            if config.rope is None:
                stored = config.max_positions + self._offset
                self._positions = builder.tensor(f"{self._name(names.positions)}.weight", stored, config.embed_dim)
            if count := config.type_vocab_size:
                types = builder.tensor(f"{self._name(names.types)}.weight", count, config.embed_dim)
                # A model with one type has no other for the second text of a pair.
                self._types = types.expand(max(2, count), -1) if count == 1 else types
            self._norm = _norm(builder, self._name(names.norm), config.embed_dim)
            if config.embed_dim != config.hidden_size:
                self._projection = builder.linear(
                    self._name(names.projection), (config.hidden_size,), config.embed_dim, True, takes_adapters=False
                )
        own = shard.layers(config)
        ropes = {config.ropes[index] for index in own} - {None}
        tables = {rope: Rotary(rope, config.max_positions, device).cos_sin for rope in ropes if rope is not None}
        self._layers = [
            EncoderLayer(
                builder,
                index,
                self._name(names.layer.format(index)),
                names,
                None if (rope := config.ropes[index]) is None else tables[rope],
            )
            for index in own
        ]
        self._final = _norm(builder, self._name(names.final_norm), config.hidden_size) if names.final_norm else None

    def _name(self, name: str) -> str:
        return f"{self.PREFIX}.{name}"

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        assert self.embedding is not None  # on the first stage
        x = self.embedding(batch.token_ids)
        if self._types is not None:
            x = x + (self._types[0] if batch.types is None else F.embedding(batch.types, self._types))
        if self._positions is not None:
            x = x + F.embedding(batch.positions + self._offset, self._positions)
        x = self._norm(x)
        return x if self._projection is None else self._projection(x)

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        bias = self.bias(step.batch.lengths)
        for layer in self._layers:
            x = layer(x, step.batch, bias)
        return x

    def bias(self, lengths: Sequence[int]) -> Bias | None:
        """Return what is added to the scores of texts of these lengths, or None."""
        return None

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._final is None else self._final(hidden)


class EncoderLayer:
    def __init__(self, builder: Builder, index: int, name: str, names: Layout, cos_sin: torch.Tensor | None) -> None:
        config, shard = builder.config, builder.shard
        hidden, width, inner = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        own, columns = shard.query_rows(config), shard.columns(config)
        self._heads, self._dim = len(shard.heads(config)), config.head_dim
        self._window, self._cos_sin, self._is_before = config.windows[index], cos_sin, config.norm_before
        is_one = len(names.qkv) == 1
        self._qkv = builder.linear(
            [f"{name}.{part}" for part in (names.qkv * 3 if is_one else names.qkv)],
            [3 * inner if is_one else inner] * 3,
            hidden,
            config.attention_bias,
            rows=[_moved(own, part * inner if is_one else 0) for part in range(3)],
        )
        self._out = builder.summed_linear(f"{name}.{names.out}", hidden, inner, config.output_bias, columns=own)
        has_norm = not (self._is_before and index == 0)  # the embeddings' norm comes before the first layer
        self._norm = _norm(builder, f"{name}.{names.attention_norm}", hidden) if has_norm else None
        self._up: Linear | _Gate
        if len(names.up) == 1 and not names.is_joined:
            self._up = builder.linear(
                f"{name}.{names.up[0]}",
                (width,),
                hidden,
                config.mlp_bias,
                rows=(columns,),
                activation=config.activation,
            )
        else:
            self._up = _gated(builder, name, names)
        has_bias = config.mlp_bias or names.has_down_bias
        self._down = builder.summed_linear(f"{name}.{names.down}", hidden, width, has_bias, columns=columns)
        self._mlp_norm = _norm(builder, f"{name}.{names.mlp_norm}", hidden)

    def __call__(self, x: torch.Tensor, batch: PackedBatch, bias: Bias | None) -> torch.Tensor:
        normed = self._norm(x) if self._is_before and self._norm is not None else x
        query, key, value = self._qkv(normed).view(len(x), 3, self._heads, self._dim).unbind(1)
        if self._cos_sin is not None:
            cos, sin = self._cos_sin[batch.positions][:, None].chunk(2, dim=-1)
            query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        attended = attend_whole(query, key, value, batch.lengths, self._dim**-0.5, window=self._window, bias=bias)
        if self._is_before:
            normed = self._out.add_to(attended, x, self._mlp_norm)
            return self._down.add_to(self._up(normed), x)
        x = self._out.add_to(attended, x, self._norm)
        return self._down.add_to(self._up(x), x, self._mlp_norm)


class _Gate:
    """Gate and up of an MLP with exact gelu, for which operations have no product of both."""

    def __init__(self, gate: Linear, up: Linear) -> None:
        self._gate, self._up = gate, up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gate(x).mul_(self._up(x))


def _gated(builder: Builder, name: str, names: Layout) -> Linear | _Gate:
    config, own = builder.config, builder.shard.columns(builder.config)
    width = config.intermediate_size
    parts, rows = [f"{name}.{part}" for part in names.up], [own, own]
    if names.is_joined:
        parts *= 2
        rows = [_moved(own, width * (names.has_up_first ^ part)) for part in (False, True)]
    outs = [2 * width if names.is_joined else width] * 2
    if (fused := _GATED.get(config.activation)) is not None:
        return builder.linear(parts, outs, config.hidden_size, config.mlp_bias, rows=rows, activation=fused)
    gate, up = (
        builder.linear(part, (out,), config.hidden_size, config.mlp_bias, rows=(of,), activation=function)
        for part, out, of, function in zip(parts, outs, rows, (config.activation, None), strict=True)
    )
    return _Gate(gate, up)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)


def _norm(builder: Builder, name: str, width: int) -> Norm:
    config = builder.config
    shift = builder.tensor(f"{name}.bias", width) if config.norm_bias else None
    return builder.ops.layer_norm(width, builder.tensor(f"{name}.weight", width), shift, config.norm_eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class WholeAttention(AttentionBackend):
    """Attention of decoders whose tokens also attend to later ones, which keep no KV."""

    name = "whole"

    def run(self, heads: Heads, kv: PagedKV, batch: PackedBatch, call: Call) -> torch.Tensor:
        query, key, value = heads
        if call.norms is not None:
            query, key = call.norms(query, key)
        if call.cos_sin is not None:
            rotate(query, key, batch.positions, call.cos_sin)
        return attend_whole(query, key, value, batch.lengths, call.softmax.scale, window=call.window)


def attend_whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    *,
    window: int = 0,
    bias: Bias | None = None,
) -> torch.Tensor:
    """Attend from every token of a segment to every other; return [T, heads * head_dim].

    Segments run one by one, so that no padding is computed and a row's bits do not depend on the batch.

    Args:
        query: Shape [T, heads, head_dim]. Likewise `key` and `value`, whose heads may be fewer.
        window: Largest distance of two tokens of which one attends to the other; 0 for any.
        bias: Added to the scores, without a window.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    each = zip(*(part.split(lengths) for part in (query, key, value, output)), strict=True)
    for *inputs, out in each:
        qkv = q, k, v = [part.transpose(0, 1)[None] for part in inputs]
        if window and len(out) > window + 1:
            _attend_near(qkv, out, scale, window)
            continue
        mask = None if bias is None else bias(len(out))
        shares = q.shape[1] != k.shape[1]
        out.copy_(F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=shares)[0].transpose(0, 1))
    return output.flatten(1)


def _attend_near(qkv: Sequence[torch.Tensor], out: torch.Tensor, scale: float, window: int) -> None:
    (q, k, v), length = qkv, len(out)
    for first in range(0, length, _QUERIES):
        end, low, high = min(length, first + _QUERIES), max(0, first - window), min(length, first + _QUERIES + window)
        places = torch.arange(low, high, device=out.device)
        mask = (places[None] - torch.arange(first, end, device=out.device)[:, None]).abs() <= window
        found = F.scaled_dot_product_attention(
            q[:, :, first:end],
            k[:, :, low:high],
            v[:, :, low:high],
            mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out[first:end].copy_(found[0].transpose(0, 1))
