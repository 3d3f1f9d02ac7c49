"""Triton attention against dense arithmetic in float64: in the interpreter here, on the card where there is one."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case
from model_zoo import PagedRunner, save_reference

pytest.importorskip("triton")

from skipjoin.model.attention.triton_backend import TritonAttention, check_triton_attention
from skipjoin.model.kernels.paged import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="no CUDA device, Triton not interpreted")

# (heads, kv_heads, head_dim, block_size, rotary_dim)
SHAPES = {
    "opt": (3, 3, 40, 16, 0),
    "mha": (2, 2, 64, 5, 16),
    "gqa3": (6, 2, 80, 8, 80),
    "gqa4": (4, 1, 128, 16, 128),
    "gqa8": (8, 1, 64, 1, 64),
}
MIX = [(30, 1), (0, 20), (64, 9), (0, 1), (50, 30)]


def run(shape, mix, processors=None, **options):
    heads, kv_heads, dim, block_size, rotary = SHAPES[shape]
    case = Case(heads, kv_heads, dim, mix, block_size=block_size, rotary=rotary, device=DEVICE, **options)
    case.check(TritonAttention(processors=processors), TOLERANCE[case.dtype])


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_mixed(shape):
    run(shape, MIX, window=11)
    run(shape, MIX, ends="both", seed=1)
