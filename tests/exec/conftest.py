"""Put the helpers of this folder on the import path, and interpret Triton kernels where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from support.interpreted import quick_interpreter  # noqa: F401 (before triton is imported)

sys.path.insert(0, str(Path(__file__).parent))
