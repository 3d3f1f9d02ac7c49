from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def attend_whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Attend from every token of a segment to every other; return [T, heads * head_dim].

    Segments run one by one, so that no padding is computed and a row's bits do not depend on the batch.

    Args:
        query: Shape [T, heads, head_dim]. Likewise `key` and `value`.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    each = zip(*(part.split(lengths) for part in (query, key, value, output)), strict=True)
    for *inputs, out in each:
        q, k, v = (part.transpose(0, 1)[None] for part in inputs)
        out.copy_(F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1))
    return output.flatten(1)
