"""Lets kernels be interpreted where there is no GPU: the benchmarks of GPUs import them."""

from __future__ import annotations

import support.interpreted  # noqa: F401 (read when triton is imported)
