from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import Heads
from skipjoin.model.attention.torch_backend import rotate
from skipjoin.model.batch import PackedBatch
from skipjoin.model.ops.base import WholeText, longest

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
