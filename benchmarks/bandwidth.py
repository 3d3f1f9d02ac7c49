"""Memory bandwidth of this machine, from which lower bounds of step times follow."""

from __future__ import annotations

import torch

from harness import seconds_of


def memory_bandwidth() -> float:
    """Return the bytes per second that all cores read together, from sums over a tensor larger than the caches."""
    data = torch.ones(1 << 28, dtype=torch.float32)
    return float(data.nbytes / min(seconds_of(data.sum) for _ in range(5)))
