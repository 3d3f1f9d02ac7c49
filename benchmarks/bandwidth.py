"""What the memory of this machine gives, for floors of times."""

from __future__ import annotations

import time

import torch


def memory_bandwidth() -> float:
    """Bytes per second that all cores read, from sums over a tensor larger than the caches."""
    data = torch.ones(1 << 28, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start))
    return best
