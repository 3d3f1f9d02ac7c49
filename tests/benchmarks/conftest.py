"""Interpret kernels where there is no GPU, because the GPU benchmarks import them."""

from __future__ import annotations

import support.interpreted  # noqa: F401 (read when triton is imported)
