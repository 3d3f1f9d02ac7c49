from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import AttentionBackend, Call, Heads, Softmax
from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV

# Returns keys and values of blocks, or of blocks and slots.
Read = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]
# Queries of a chunk whose scores are in memory at a time, where torch has no operation for all.
_ROWS = 256


class TorchAttention(AttentionBackend):
    """Reference attention: decodes run as one padded batch, and prefill chunks one by one."""

    name = "torch"

    def run(self, heads: Heads, kv: PagedKV, batch: PackedBatch, call: Call) -> torch.Tensor:
        (query, key, value), (layer, softmax, window, cos_sin, norms) = heads, call
        if norms is not None:
            query, key = norms(query, key)
        if cos_sin is not None:
            rotate(query, key, batch.positions, cos_sin)
        read = partial(kv.read, layer, dtype=query.dtype)
        kv.write(layer, (batch.slots // kv.block_size, batch.slots % kv.block_size), (key, value))
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if batch.decode_only:
            output[:] = _decode(query, *_cached(read, batch), batch.context_lens, softmax=softmax, window=window)
            return output.flatten(1)
        decodes = [i for i, length in enumerate(batch.lengths) if length == 1]
        if decodes:
            segments = torch.tensor(decodes, device=query.device)
            tokens = batch.query_start[segments]
            k, v = _cached(read, batch, segments)
            output[tokens] = _decode(query[tokens], k, v, batch.context_lens[segments], softmax=softmax, window=window)
        end = 0
        for i, (start, length) in enumerate(zip(batch.starts, batch.lengths, strict=True)):
            begin, end = end, end + length
            if length == 1:
                continue
            k, v = key[begin:end], value[begin:end]
            # A token must attend to the same numbers whether it is in a prompt or follows it.
            if start or kv.format.is_rounded:
                k, v = (x[0] for x in _cached(read, batch, slice(i, i + 1), start + length))
            output[begin:end] = _chunk(query[begin:end], k, v, start, softmax=softmax, window=window)
        return output.flatten(1)


def _weights(products: torch.Tensor, unseen: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    scores = products.float() * softmax.scale
    if softmax.cap:
        scores = scores.div_(softmax.cap).tanh_().mul_(softmax.cap)
    scores = scores.masked_fill_(unseen, -torch.inf)
    if softmax.sinks is None:
        return scores.softmax(-1)
    sinks = softmax.sinks.view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def rotate(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    pairs = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(pairs, dim=-1)
    for x in (query, key):
        first, second = x[..., :pairs].float(), x[..., pairs : 2 * pairs].float()
        # In float32 `first` is a view of memory that the next line overwrites.
        rotated = second * cos + first * sin
        x[..., :pairs] = first * cos - second * sin
        x[..., pairs : 2 * pairs] = rotated


def _cached(
    read: Read, batch: PackedBatch, segments: torch.Tensor | slice = slice(None), context: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n, slots, kv_heads, dim] in position order."""
    tables, size = batch.block_tables[segments], batch.block_size
    if batch.plain:
        tables = tables[:, : -(-(batch.max_context if context is None else context) // size)]
        keys, values = read((tables,))
        return keys.flatten(1, 2)[:, :context], values.flatten(1, 2)[:, :context]
    last = tables.shape[1] * size - 1
    position = torch.arange(batch.max_context if context is None else context, device=tables.device)
    # Positions beyond the sequence are masked later, so any slot of the table works.
    index = position.clamp_(max=last).expand(len(tables), -1)
    block, slot = tables.gather(1, index // size), index % size
    slot = torch.where(batch.reversed[segments, None] > 0, size - 1 - slot, slot)
    return read((block, slot))


def _decode(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: torch.Tensor, *, softmax: Softmax, window: int
) -> torch.Tensor:
    n, heads, dim = query.shape
    kv_heads = k.shape[2]
    position = torch.arange(k.shape[1], device=query.device)
    unseen = position >= context[:, None]
    if window:
        unseen |= position < context[:, None] - window
    grouped = query.reshape(n, kv_heads, heads // kv_heads, dim)
    weights = _weights(grouped @ k.permute(0, 2, 3, 1), unseen[:, None, None], softmax).to(v.dtype)
    # A weight of zero does not remove a NaN in an unused slot, since zero times NaN is NaN.
    v = v.masked_fill(unseen[:, :, None, None], 0)
    return (weights @ v.permute(0, 2, 1, 3)).view(n, heads, dim)


def _chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, *, softmax: Softmax, window: int
) -> torch.Tensor:
    """Attend with one sequence's tokens; keys and values are [start + n, kv_heads, dim]."""
    mask, is_plain = None, not softmax.cap and softmax.sinks is None
    if start or window or not is_plain:
        own = torch.arange(start, start + len(query), device=query.device)[:, None]
        seen = torch.arange(len(key), device=query.device)
        mask = seen <= own
        if window:
            mask &= seen > own - window
    if mask is not None and not is_plain:
        parts = zip(query.split(_ROWS), mask.split(_ROWS), strict=True)
        return torch.cat([_chunk_part(rows, key, value, ~seen_keys, softmax) for rows, seen_keys in parts])
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=softmax.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)


def _chunk_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unseen: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    n, heads, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(n, kv_heads, heads // kv_heads, dim)
    weights = _weights(grouped @ key.permute(1, 2, 0), unseen[:, None, None], softmax).to(value.dtype)
    return (weights @ value.transpose(0, 1)).view(n, heads, dim)
