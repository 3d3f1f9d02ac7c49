"""Imported before triton: its kernels are interpreted where there is no CUDA device."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
