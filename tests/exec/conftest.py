"""Makes the helpers of this folder importable, and lets kernels be interpreted where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import support.interpreted  # noqa: F401 (read when triton is imported)

sys.path.insert(0, str(Path(__file__).parent))
