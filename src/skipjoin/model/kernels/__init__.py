"""Triton kernels, one file per operation. Nothing here is imported where Triton is missing."""

import os

# Multiplications and additions are fused; Triton 3.9 warns unless somebody says so.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
