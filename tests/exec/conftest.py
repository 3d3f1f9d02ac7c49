"""Makes the helpers of this folder importable, and lets kernels be interpreted where there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

# Read when triton is imported, which nothing has done yet.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.insert(0, str(Path(__file__).parent))
