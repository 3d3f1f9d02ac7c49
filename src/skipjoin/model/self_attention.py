from __future__ import annotations

import math
from collections.abc import Callable

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.builder import Builder
from skipjoin.model.modules import Adjusted
from skipjoin.model.ops.base import AttentionParts, HeadNorm, Linear, Norm
from skipjoin.model.rope import RopeSettings


def inverse_frequencies(rope: RopeSettings) -> torch.Tensor:
    """Return the radians per position of each pair.

    Operations round to float32 in Hugging Face's order: at position 100,000, one rounding less turns a pair by up to
    0.006.
    """
    turned = rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    plain = 1.0 / turned
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * turned)
    if rope.scaling == "factors":
        return plain / torch.tensor(rope.factors)
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        kept = _kept(rope, len(plain))
        return 1.0 / (rope.factor * turned) * (1 - kept) + plain * kept
    return plain


def _llama3(rope: RopeSettings, plain: torch.Tensor) -> torch.Tensor:
    length, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    keep = (length / wavelength - low) / (high - low)
    between = (1 - keep) * plain / rope.factor + keep * plain
    scaled = torch.where(wavelength > length / low, plain / rope.factor, between)
    return torch.where(wavelength < length / high, plain, scaled)


def _kept(rope: RopeSettings, pairs: int) -> torch.Tensor:
    def pair_with_turns(turns: float) -> float:
        wave = rope.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = (high - low) or 0.001  # a ramp of width 0 would divide by zero
    return 1 - ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)


class Rotary:
    def __init__(self, rope: RopeSettings, max_positions: int, device: torch.device | str) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor
        self.cos_sin = table.to(device)
        self.query_scales: torch.Tensor | None = None
        if rope.query_beta:
            turns = torch.arange(max_positions) // rope.original_max_positions
            self.query_scales = (1 + rope.query_beta * torch.log1p(turns.float())).to(device)


def rotaries(builder: Builder, device: torch.device | str) -> dict[int, Rotary | None]:
    """Return the rotary positions of this rank's layers, of which those with the same settings share a table."""
    config = builder.config
    own = {index: config.ropes[index] for index in builder.shard.layers(config)}
    tables = {rope: Rotary(rope, config.max_positions, device) for rope in {*own.values()} if rope is not None}
    return {index: None if rope is None else tables[rope] for index, rope in own.items()}


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
        of = self.parts
        qkv = of.qkv(x).view(-1, of.heads + 2 * of.kv_heads, of.dim)
        query, key, value = qkv.split([of.heads, of.kv_heads, of.kv_heads], dim=1)
        return of.output.add_to(attended(of, (query, key, value), step), total, then)


def attended(of: AttentionParts, qkv: tuple[torch.Tensor, ...], step: LayerInputs) -> torch.Tensor:
    """Return [T, heads * dim] of projected queries, keys and values."""
    query, key, value = qkv
    if of.qk_norms is not None and of.head_weights is None:
        query, key = of.qk_norms[0](query), of.qk_norms[1](key)
    if of.query_scales is not None:
        query = query * of.query_scales[step.batch.positions, None, None].to(query.dtype)
    return step.attention.attend(
        query, key, value, step.kv, step.batch,
        layer=of.layer, scale=of.scale, window=of.window, cap=of.cap, sinks=of.sinks, cos_sin=of.cos_sin,
        norms=of.head_weights,
    )  # fmt: skip


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
        adjust: Changes the output before it is added.
        joined: Name of one matrix that has the rows of all three.
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
    pairs = torch.arange(rotary_dim).view(-1, 2).t().flatten()
    order = torch.cat([pairs, torch.arange(rotary_dim, dim)])
    return (torch.arange(0, rows, dim)[:, None] + order).flatten()
