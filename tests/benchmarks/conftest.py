"""Interpret kernels where there is no GPU, because the GPU benchmarks import them."""

from __future__ import annotations

from support.interpreted import quick_interpreter  # noqa: F401 (before triton is imported)
