"""Matrices in codes, and what products of them are."""

from __future__ import annotations

import torch

from skipjoin.model.groups import GroupedMatrix

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Bits, inputs per scale, and what else a matrix has.
KINDS = [
    (4, 32, "offset"),
    (4, 32, "minimums"),
    (4, 32, "values"),
    (4, 32, "wide"),
    (4, 16, "offset"),
    (4, 16, "minimums"),
    (4, 128, "minimums"),
    (6, 32, "minimums"),
    (6, 16, "offset"),
    (8, 32, ""),
    (8, 32, "minimums"),
    (8, 16, ""),
]
# Outputs and inputs: whole strips and blocks, and parts of them.
SHAPES = [(96, 128), (70, 48)]


def drawn_matrix(kind: tuple[int, int, str], outputs: int, inputs: int, seed: int = 0) -> GroupedMatrix:
    bits, group, has = kind
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(*((0, 2**bits) if bits < 8 else (-128, 128)), (outputs, inputs), generator=generator)
    dtype = torch.float32 if has == "wide" else torch.float16
    count = -(-inputs // group)
    scales = torch.rand(outputs, count, generator=generator) * 2**-bits + 2**-12
    minimums = torch.randn(outputs, count, generator=generator) if has in ("minimums", "wide") else None
    return GroupedMatrix(
        codes.to(torch.uint8 if bits < 8 else torch.int8),
        scales.to(dtype),
        group,
        bits,
        None if minimums is None else minimums.to(dtype),
        2 ** (bits - 1) if has == "offset" else 0,
        VALUES if has == "values" else None,
    )


def rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    """Round to 8 bits as products do: with a scale per row and 32 inputs, which maps the largest to 127."""
    rows, inputs = x.shape
    blocks = torch.nn.functional.pad(x.float(), (0, -inputs % 32)).view(rows, -1, 32)
    top = blocks.abs().amax(-1, keepdim=True)
    most = torch.full_like(top, 127)
    return ((blocks * (most / top)).round() * (top / most)).view(rows, -1)[:, :inputs]
