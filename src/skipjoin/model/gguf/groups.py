"""Codes and scales of the blocks of GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Bytes = np.ndarray  # [rows, blocks, bytes]
# Numbers that the codes of two types stand for.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Parts(NamedTuple):
    """Codes [rows, blocks, numbers], and scales and minimums [rows, blocks, groups], float16 or float32."""

    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray | None = None


class Layout(NamedTuple):
    """How a type stores weights; the fields are those of `GroupedMatrix`."""

    parts: Callable[[Bytes], Parts]
    group: int
    bits: int
    has_minimums: bool = False
    offset: int = 0
    values: tuple[int, ...] | None = None
    scale_bytes: int = 2


def _half(blocks: Bytes, at: int) -> np.ndarray:
    return blocks[..., at : at + 2].copy().view(np.float16)


def _nibbles(blocks: Bytes, width: int) -> np.ndarray:
    """Return the lower and then the upper four bits of each `width` bytes."""
    parts = blocks.reshape(*blocks.shape[:2], -1, width)
    codes = np.empty((*parts.shape[:3], 2, width), np.uint8)
    np.bitwise_and(parts, 15, out=codes[..., 0, :])
    np.right_shift(parts, 4, out=codes[..., 1, :])
    return codes.reshape(*blocks.shape[:2], -1)


def _twos(blocks: Bytes) -> np.ndarray:
    """Return the bits of each 32 bytes in pairs, from the lowest."""
    parts = blocks.reshape(*blocks.shape[:2], -1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return parts.reshape(*blocks.shape[:2], -1)


def _bits(blocks: Bytes) -> np.ndarray:
    return np.unpackbits(blocks, axis=-1, bitorder="little")


def _q4_0(blocks: Bytes) -> Parts:
    return Parts(_nibbles(blocks[..., 2:], 16), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Parts:
    return Parts(_nibbles(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[..., 6:], 16) | _bits(blocks[..., 2:6]) << 4
    return Parts(codes, _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[..., 8:], 16) | _bits(blocks[..., 4:8]) << 4
    return Parts(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Parts:
    return Parts(blocks[..., 2:], _half(blocks, 0))


def _scaled(blocks: Bytes, at: int, factors: np.ndarray) -> np.ndarray:
    """Return the scales of a block's groups, which are small integers times a float16, in the same type."""
    with np.errstate(over="ignore"):  # scales of damaged files
        return np.asarray(_half(blocks, at).astype(np.float32) * factors, np.float16)


def _q2_k(blocks: Bytes) -> Parts:
    packed = blocks[..., :16]
    scales, minimums = _scaled(blocks, 80, packed & 15), -_scaled(blocks, 82, packed >> 4)
    return Parts(_twos(blocks[..., 16:80]), scales, minimums)


def _q3_k(blocks: Bytes) -> Parts:
    high = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _twos(blocks[..., 32:96]) | high.reshape(*blocks.shape[:2], 256) << 2
    low, upper = _nibbles(blocks[..., 96:104], 8), blocks[..., 104:108]
    twos = upper[..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    factors = (low | twos.reshape(*blocks.shape[:2], 16) << 4).astype(np.int8) - 32
    return Parts(codes, _scaled(blocks, 108, factors))


def _six(packed: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight scales and minimums of six bits in 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    return scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)


def _q4_k(blocks: Bytes) -> Parts:
    scales, minimums = _six(blocks[..., 4:16])
    return Parts(_nibbles(blocks[..., 16:], 32), _scaled(blocks, 0, scales), -_scaled(blocks, 2, minimums))


def _q5_k(blocks: Bytes) -> Parts:
    scales, minimums = _six(blocks[..., 4:16])
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(blocks[..., 48:], 32) | high.reshape(*blocks.shape[:2], 256) << 4
    return Parts(codes, _scaled(blocks, 0, scales), -_scaled(blocks, 2, minimums))


def _q6_k(blocks: Bytes) -> Parts:
    low = _nibbles(blocks[..., :128], 64)
    codes = low | _twos(blocks[..., 128:192]) << 4
    return Parts(codes, _scaled(blocks, 208, blocks[..., 192:208].view(np.int8)))


def _iq4_xs(blocks: Bytes) -> Parts:
    low = _nibbles(blocks[..., 4:8, None].reshape(*blocks.shape[:2], 4), 1)
    upper = blocks[..., 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    factors = (low | upper.astype(np.uint8) << 4).astype(np.int8) - 32
    return Parts(_nibbles(blocks[..., 8:], 16), _scaled(blocks, 0, factors))


def _mxfp4(blocks: Bytes) -> Parts:
    return Parts(_nibbles(blocks[..., 1:], 16), np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128))


# Types with codes of five bits have them in six.
LAYOUTS = {
    "Q4_0": Layout(_q4_0, 32, 4, offset=8),
    "Q4_1": Layout(_q4_1, 32, 4, has_minimums=True),
    "Q5_0": Layout(_q5_0, 32, 6, offset=16),
    "Q5_1": Layout(_q5_1, 32, 6, has_minimums=True),
    "Q8_0": Layout(_q8_0, 32, 8),
    "Q2_K": Layout(_q2_k, 16, 4, has_minimums=True),
    "Q3_K": Layout(_q3_k, 16, 4, offset=4),
    "Q4_K": Layout(_q4_k, 32, 4, has_minimums=True),
    "Q5_K": Layout(_q5_k, 32, 6, has_minimums=True),
    "Q6_K": Layout(_q6_k, 16, 6, offset=32),
    "IQ4_NL": Layout(_q4_0, 32, 4, values=_IQ4),
    "IQ4_XS": Layout(_iq4_xs, 32, 4, values=_IQ4),
    "MXFP4": Layout(_mxfp4, 32, 4, values=_FP4, scale_bytes=4),
}
