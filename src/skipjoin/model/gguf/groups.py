from __future__ import annotations

from ctypes import c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch

from skipjoin.model.groups import GroupedMatrix
from skipjoin.model.ops.build import declare, load_library
from skipjoin.model.ops.threads import threads_here

# Numbers that the codes of two types stand for.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_I, _P = c_int64, c_void_p


class Layout(NamedTuple):
    group: int
    bits: int
    has_minimums: bool = False
    offset: int = 0
    values: tuple[int, ...] | None = None
    scale_bytes: int = 2


# In the order of `Kind` in unpack.cpp. Types with codes of five bits have them in six.
LAYOUTS = {
    "Q4_0": Layout(32, 4, offset=8),
    "Q4_1": Layout(32, 4, has_minimums=True),
    "Q5_0": Layout(32, 6, offset=16),
    "Q5_1": Layout(32, 6, has_minimums=True),
    "Q8_0": Layout(32, 8),
    "Q2_K": Layout(16, 4, has_minimums=True),
    "Q3_K": Layout(16, 4, offset=4),
    "Q4_K": Layout(32, 4, has_minimums=True),
    "Q5_K": Layout(32, 6, has_minimums=True),
    "Q6_K": Layout(16, 6, offset=32),
    "IQ4_NL": Layout(32, 4, values=_IQ4),
    "IQ4_XS": Layout(32, 4, values=_IQ4),
    "MXFP4": Layout(32, 4, values=_FP4, scale_bytes=4),
}


def unpacked(kind: str, stored: np.ndarray, rows: np.ndarray, width: int) -> GroupedMatrix:
    """Return rows of `width` numbers of the stored bytes [rows, bytes] of a type of `LAYOUTS`.

    Scales of the types with `K` or `XS` are small integers times a float16, and rounded to that type.
    """
    library = load_library()
    if library is None:
        raise OSError("products of codes need compiled operations")
    layout, count = LAYOUTS[kind], len(rows)
    if count and not 0 <= rows.min() <= rows.max() < len(stored):
        raise IndexError(f"rows must be in [0, {len(stored) - 1}]")
    codes = torch.empty((count, width), dtype=torch.int8 if layout.bits == 8 else torch.uint8)
    dtype = torch.float16 if layout.scale_bytes == 2 else torch.float32
    scales = torch.empty((count, width // layout.group), dtype=dtype)
    minimums = torch.empty_like(scales) if layout.has_minimums else None
    wanted = np.ascontiguousarray(rows, np.int64)
    declare(library.skipjoin_unpack_blocks, _I, _P, _I, _P, _I, _I, _P, _P, _P, _I)(
        list(LAYOUTS).index(kind), stored.ctypes.data, stored.shape[1], wanted.ctypes.data, count, width,
        codes.data_ptr(), scales.data_ptr(), None if minimums is None else minimums.data_ptr(), threads_here(),
    )  # fmt: skip
    return GroupedMatrix(codes, scales, layout.group, layout.bits, minimums, layout.offset, layout.values)
