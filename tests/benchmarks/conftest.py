"""Make the benchmarks importable, and interpret kernels where there is no GPU, because its benchmarks import them."""

from __future__ import annotations

import sys

from support.figures import BENCHMARKS
from support.interpreted import quick_interpreter  # noqa: F401 (before triton is imported)

sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "performance")]
