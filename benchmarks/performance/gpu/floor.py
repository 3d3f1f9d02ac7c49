"""Lower bound of the time of a decode step on a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipjoin.sim.models import ModelShape


def floor_of(
    shape: ModelShape, batch: int, context: float, ceilings: Mapping[str, float], reads: str = "copy_bytes_per_s"
) -> tuple[int, float]:
    """Return the bytes that a decode step reads and a lower bound of its seconds.

    Each product takes the longer of the times to read its weights and to multiply. The embedding table is not read.

    Args:
        context: Tokens of context of all requests together.
        reads: Name of the bandwidth with which it reads.
    """
    queries, both = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim * 2
    layer = [
        shape.hidden * (queries + both),
        queries * shape.hidden,
        shape.hidden * shape.intermediate * (2 if shape.gated else 1),
        shape.intermediate * shape.hidden,
    ]
    weights = [*layer * shape.layers, shape.head_parameters]
    pieces = [(size * shape.parameter_bytes, 2 * size * batch) for size in weights]
    kv_bytes = int(context) * shape.kv_bytes_per_token
    pieces += [(kv_bytes, int(4 * shape.layers * queries * context))]
    bandwidth, rate = ceilings[reads], ceilings["matmul_flop_per_s"]
    return sum(size for size, _ in pieces), sum(max(size / bandwidth, flop / rate) for size, flop in pieces)
