"""Select Triton's interpreter on a machine without a CUDA device. Import this module before triton."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
