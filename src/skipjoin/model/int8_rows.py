"""Rows of the int8 KV cache: codes of one token and head, and their scale.

A row has its own scale, so that it is quantized once, when it is written, without other tokens.
"""

from __future__ import annotations

import torch

# Bytes of the float32 scale that follows the codes of a row.
SCALE_BYTES = 4
MAX_CODE = 127
# Keeps quotients of rows of zeros and subnormals finite.
MIN_SCALE = 2.0**-100


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes of the shape of `rows`, and float32 scales without its last dimension.

    A row that is not finite gets a scale that makes it so again.
    """
    numbers = rows.float()
    scales = (numbers.abs().amax(-1) / MAX_CODE).clamp_(min=MIN_SCALE)
    codes = (numbers / scales[..., None]).nan_to_num_(0).round_()
    return codes.to(torch.int8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (codes.float() * scales[..., None]).to(dtype)
