"""Triton kernels, one file per operation. Imported only if Triton is installed."""

import os

from skipjoin.model.kernels.cache import protect_triton_cache

# Multiplications and additions are fused; Triton 3.9 warns if this is not set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
protect_triton_cache()  # before a kernel is compiled or loaded
