"""Rates of this machine, from which lower bounds of step times follow."""

from __future__ import annotations

import torch

from harness import seconds_of
from skipjoin.model.ops.build import load_library
from skipjoin.model.ops.cpp_ops import CppOps

# A matrix larger than the caches, and rows of a prompt.
_OUTPUTS, _INPUTS, _ROWS = 1 << 17, 4096, 512
_REPEATS = 5


def memory_bandwidth() -> float:
    """Return the bytes per second that torch's threads read, by the faster of a sum and a product with one row."""
    data = torch.ones(1 << 28, dtype=torch.float32)
    found = data.nbytes / min(seconds_of(data.sum) for _ in range(_REPEATS))
    del data
    return max(float(found), product_rates()[0])


def product_rates() -> tuple[float, float]:
    """Return the bytes per second of weights with one row, and the operations per second with the rows of a prompt.

    Both are of our own products in bfloat16 with as many threads as torch has, and 0 where nothing is compiled.
    """
    library = load_library()
    if library is None:
        return 0.0, 0.0
    ops = CppOps(library, torch.bfloat16)
    threads = torch.get_num_threads()
    ops.use_threads(threads)  # leaves torch one thread
    linear = ops.linear(torch.ones(_OUTPUTS, _INPUTS, dtype=torch.bfloat16), None)
    one, many = (torch.ones(rows, _INPUTS, dtype=torch.bfloat16) for rows in (1, _ROWS))
    with ops.step():
        reading = min(seconds_of(lambda: linear(one)) for _ in range(_REPEATS))
        products = min(seconds_of(lambda: linear(many)) for _ in range(_REPEATS))
    torch.set_num_threads(threads)
    return linear.weight_bytes / reading, 2 * _OUTPUTS * _INPUTS * _ROWS / products
