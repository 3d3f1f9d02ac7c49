"""Attention in plain torch operations: the reference for every other back end, on CPU and CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV


class TorchAttention:
    """Decodes as one padded batch, prefill chunks one sequence at a time through scaled_dot_product_attention."""

    name = "torch"

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: PagedKV,
        batch: PackedBatch,
        *,
        layer: int,
        scale: float,
        window: int = 0,
        cos_sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if cos_sin is not None:
            rotate(query, key, batch.positions, cos_sin)
        options = {"scale": scale, "window": window}
        keys, values = kv.layer(layer)
        block, offset = batch.slots // kv.block_size, batch.slots % kv.block_size
        keys[block, offset] = key
        values[block, offset] = value
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if batch.decode_only:
            output[:] = _decode(query, keys, values, batch.block_tables, batch.context_lens, **options)
            return output.flatten(1)
        decodes = [i for i, length in enumerate(batch.lengths) if length == 1]
        if decodes:
            segments = torch.tensor(decodes, device=query.device)
            tokens = batch.query_start[segments]
            tables, context = batch.block_tables[segments], batch.context_lens[segments]
            output[tokens] = _decode(query[tokens], keys, values, tables, context, **options)
        end = 0
        for i, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
            begin, end = end, end + length
            if length == 1:
                continue
            k, v = key[begin:end], value[begin:end]
            if start:
                table = batch.block_tables[i, : -(-(start + length) // kv.block_size)]
                k = keys[table].flatten(0, 1)[: start + length]
                v = values[table].flatten(0, 1)[: start + length]
            output[begin:end] = _chunk(query[begin:end], k, v, start, **options)
        return output.flatten(1)


def rotate(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotary embedding in place of [n, heads, head_dim] views; `cos_sin` as in `AttentionBackend.attend`."""
    pairs = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(pairs, dim=-1)
    for x in (query, key):
        first, second = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
        # In float32 `first` is a view of what the next line overwrites.
        rotated = second * cos + first * sin
        x[..., :pairs] = first * cos - second * sin
        x[..., pairs : 2 * pairs] = rotated


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    context: torch.Tensor,
    *,
    scale: float,
    window: int,
) -> torch.Tensor:
    """One query per sequence. query: [n, heads, dim]; tables: [n, width]; context: [n]; returns as `query`."""
    n, heads, dim = query.shape
    kv_heads = keys.shape[2]
    k = keys[tables].flatten(1, 2)  # [n, width * block_size, kv_heads, dim]
    v = values[tables].flatten(1, 2)
    position = torch.arange(k.shape[1], device=query.device)
    unseen = position >= context[:, None]
    if window:
        unseen |= position < context[:, None] - window
    grouped = query.reshape(n, kv_heads, heads // kv_heads, dim)
    scores = (grouped @ k.permute(0, 2, 3, 1)).float() * scale
    weights = scores.masked_fill_(unseen[:, None, None], -torch.inf).softmax(-1).to(v.dtype)
    # A weight of zero does not hide a NaN in an unused slot: zero times NaN is NaN.
    v = v.masked_fill(unseen[:, :, None, None], 0)
    return (weights @ v.permute(0, 2, 1, 3)).view(n, heads, dim)


def _chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, *, scale: float, window: int
) -> torch.Tensor:
    """New tokens of one sequence. query: [n, heads, dim]; key, value: [start + n, kv_heads, dim]."""
    mask = None
    if start or window:
        own = torch.arange(start, start + len(query), device=query.device)[:, None]
        seen = torch.arange(len(key), device=query.device)
        mask = seen <= own
        if window:
            mask &= seen > own - window
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)
