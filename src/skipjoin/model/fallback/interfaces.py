from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

# Under this name there is no function for masks, so that models make none. Under the other, masks are sampled.
PAGED = "skipjoin"
SAMPLED = "skipjoin-sampled"
# The window of a mask is measured from this position, beyond the longest one.
_FAR = 1 << 20
# Positions at which masks are compared with their window: the first, and those around powers of two, where windows and
# chunks begin.
SAMPLES = np.unique([*range(9), *(2**power + step for power in range(3, 20) for step in (-1, 0, 1))])
# Window of a mask that is not causal with a window. Lower by its length is that of one that is causal within chunks.
OTHER_MASK = -1
# Queries, keys and values, [1, heads, T, dim] each.
QueryKeyValue = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Attributes of modules, set from outside.
_ATTEND, _APPLY = "skipjoin_attend", "skipjoin_experts"


def hook(module: torch.nn.Module, *, attend: Callable[..., Any] | None = None, experts: Any = None) -> None:
    for name, function in ((_ATTEND, attend), (_APPLY, experts)):
        if function is not None:
            setattr(module, name, function)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return getattr(module, _ATTEND)(module, (query, key, value), attention_mask, options), None


def apply_experts(
    module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    applied: torch.Tensor = getattr(module, _APPLY)(module, hidden, chosen, weights)
    return applied


def _window_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **ignored: Any
) -> torch.Tensor:
    """Return a tensor of the mask's window instead of the mask.

    It is the size, or 0 for a causal mask without one, `OTHER_MASK` minus the size for chunks, and `OTHER_MASK` for
    others.
    """
    with torch.device("cpu"):
        _without_padding(mask_function)
        zero, far, at = torch.zeros((), dtype=torch.int64), torch.arange(_FAR + 1), torch.from_numpy(SAMPLES)

        def seen(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            shape = torch.broadcast_shapes(query.shape, key.shape)
            return torch.as_tensor(mask_function(zero, zero, query, key)).expand(shape)

        # Queries that see the first key. In a window or chunk, they are followed by others.
        window = int(seen(far, far[:1]).sum())
        distance, found = at[:, None] - at, seen(at[:, None], at)
        if not torch.equal(found, (distance >= 0) & (distance < window)):
            is_chunk = torch.equal(found, (distance >= 0) & (at[:, None] // window == at // window))
            window = OTHER_MASK - window if is_chunk else OTHER_MASK
        return torch.full((1, 1, q_length, kv_length), 0 if window > _FAR else window)


def _without_padding(mask_function: Any) -> None:
    for cell in getattr(mask_function, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, torch.Tensor) and value.is_meta:
            cell.cell_contents = torch.zeros(value.shape, dtype=value.dtype)
        for part in value if isinstance(value, tuple) else (value,):
            _without_padding(part)


def register() -> None:
    for name in (PAGED, SAMPLED):
        AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(SAMPLED, _window_mask)
    ExpertsInterface.register(PAGED, apply_experts)
