"""Formats of KV by the names that `kv_cache_dtype` and `swap_dtype` have. Sizes need no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch


class CacheFormat(ABC):
    """Rows of the KV cache: the key or value of one token and head.

    Attributes:
        storage: torch's type of a row's elements; empty for the model's.
        readers: Attention back ends that read it besides the reference.
        has_scale: Whether the last float32 of a row is the scale of its codes.
        is_rounded: Whether a row that was written differs from the one that is read.
    """

    name: str
    storage = ""
    readers: frozenset[str] = frozenset()
    has_scale = False
    is_rounded = True

    @abstractmethod
    def row(self, head_dim: int) -> int: ...

    @abstractmethod
    def row_bytes(self, head_dim: int, itemsize: int) -> int:
        """Return the bytes of a row; `itemsize` is that of the model's numbers."""

    @abstractmethod
    def quantize(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the stored rows, [..., row], of [..., head_dim]."""

    @abstractmethod
    def dequantize(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor: ...

    def why_not(self, head_dim: int) -> str | None:
        return None


class SwapFormat(ABC):
    """Blocks in CPU memory, a row of bytes each, of numbers [heads, block_size, head_dim].

    Attributes:
        is_exact: Whether blocks are copied as they are, so that a block may return for another request.
        has_kernels: Whether compiled code and Triton kernels convert it.
    """

    name: str
    is_exact = False
    has_kernels = False

    @abstractmethod
    def block_bytes(self, shape: tuple[int, int, int], row_bytes: int) -> int:
        """Return the bytes of a block; exact formats need `row_bytes`, those of a row in the cache."""

    def quantize(self, blocks: torch.Tensor, last: int) -> torch.Tensor:
        """Return uint8 [blocks, block_bytes] of [blocks, heads, block_size, head_dim].

        The last block has `last` tokens; its other slots may hold anything.
        """
        raise NotImplementedError

    def dequantize(self, rows: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError


CACHE_FORMATS: dict[str, CacheFormat] = {}
SWAP_FORMATS: dict[str, SwapFormat] = {}
CacheT = TypeVar("CacheT", bound=type[CacheFormat])
SwapT = TypeVar("SwapT", bound=type[SwapFormat])


def cache_format(cls: CacheT) -> CacheT:
    CACHE_FORMATS[cls.name] = cls()
    return cls


def swap_format(cls: SwapT) -> SwapT:
    SWAP_FORMATS[cls.name] = cls()
    return cls


def types_text(dtype: str, kv_cache_dtype: str) -> str:
    return dtype if kv_cache_dtype == "auto" else f"{dtype}, {kv_cache_dtype} KV"


@cache_format
class ModelRows(CacheFormat):
    name = "auto"
    readers = frozenset({"cpp", "triton", "flash"})
    is_rounded = False

    def row(self, head_dim: int) -> int:
        return head_dim

    def row_bytes(self, head_dim: int, itemsize: int) -> int:
        return head_dim * itemsize

    def quantize(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def dequantize(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return stored


@cache_format
class Int8Rows(CacheFormat):
    """Codes of 8 bits, then the row's own float32 scale. A row that is not finite becomes finite."""

    name = storage = "int8"
    readers = frozenset({"cpp", "triton"})
    has_scale = True
    SCALE_BYTES = 4
    MAX_CODE = 127
    # Keeps quotients of rows of zeros and subnormals finite.
    MIN_SCALE = 2.0**-100

    def row(self, head_dim: int) -> int:
        return head_dim + self.SCALE_BYTES

    def row_bytes(self, head_dim: int, itemsize: int) -> int:
        return self.row(head_dim)

    def quantize(self, rows: torch.Tensor) -> torch.Tensor:
        import torch  # noqa: PLC0415

        numbers = rows.float()
        scales = (numbers.abs().amax(-1, keepdim=True) / self.MAX_CODE).clamp_(min=self.MIN_SCALE)
        codes = (numbers / scales).nan_to_num_(0).round_().to(torch.int8)
        return torch.cat((codes, scales.view(torch.int8)), -1)

    def dequantize(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        import torch  # noqa: PLC0415

        scales = stored[..., head_dim:].contiguous().view(torch.float32)
        return (stored[..., :head_dim].float() * scales).to(dtype)

    def why_not(self, head_dim: int) -> str | None:
        if head_dim % self.SCALE_BYTES == 0:
            return None
        return f"a head_dim that is a multiple of {self.SCALE_BYTES}, the model has {head_dim}"


@swap_format
class CacheRows(SwapFormat):
    name = "auto"
    is_exact = True

    def block_bytes(self, shape: tuple[int, int, int], row_bytes: int) -> int:
        heads, block_size, _ = shape
        return heads * block_size * row_bytes


@swap_format
class Int8Channels(SwapFormat):
    """Codes of 8 bits (ALISE section 3.2, "KV Compression").

    A block holds the scales and minima of its channels, bfloat16 [heads, 2, head_dim], then the codes, uint8 [heads,
    block_size, head_dim]:

        minimum = the smallest number, rounded down        code   = round((x - minimum) / scale), in [0, 255]
        scale   = (largest - minimum) / 255, rounded up    x again = minimum + scale * code

    The paper prints an integer zero point of round(-2^b / (max - min)); it must be round(-min / scale).

    Products of a code and a scale are exact in float32, so all implementations return the same bits. NaN, infinities,
    numbers from 2^126 on and slots after the last token affect neither minimum nor scale. They are restored as the
    largest number of their channel, NaN and negative ones as its minimum.
    """

    name = "int8"
    has_kernels = True
    LEVELS = 255
    # Numbers from here on count as infinite, so that differences of two are finite.
    INFINITE = 2.0**126
    # Minimum scale with a finite reciprocal.
    MIN_SCALE = 2.0**-126

    def block_bytes(self, shape: tuple[int, int, int], row_bytes: int) -> int:
        return self._scale_bytes(shape) + math.prod(shape)

    def quantize(self, blocks: torch.Tensor, last: int) -> torch.Tensor:
        import torch  # noqa: PLC0415

        x = blocks.float()
        is_stale = torch.zeros(x.shape[:3], dtype=torch.bool, device=x.device)
        is_stale[-1, :, last:] = True
        is_out = is_stale[..., None] | ~(x.abs() < self.INFINITE)
        low, high = x.masked_fill(is_out, torch.inf).amin(2), x.masked_fill(is_out, -torch.inf).amax(2)
        has_any = low <= high
        low, high = _cut(low.where(has_any, 0.0), up=False), high.where(has_any, 0.0)
        # By a tensor, because on CUDA torch multiplies by the reciprocal of a number, which rounds differently.
        scale = _cut((high - low) / high.new_full((), self.LEVELS), up=True).clamp(min=self.MIN_SCALE)
        low, high, inverse = (part[:, :, None] for part in (low, high, scale.reciprocal()))
        inside = torch.minimum(x, high).where(x > low, low)  # NaN becomes the minimum
        codes = ((inside - low) * inverse).round().masked_fill(is_stale[..., None], 0).to(torch.uint8)
        scales = torch.stack((scale, low[:, :, 0]), 2).to(torch.bfloat16)
        return torch.cat((scales.flatten(1).view(torch.uint8), codes.flatten(1)), 1)

    def dequantize(self, rows: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        import torch  # noqa: PLC0415

        heads, tokens, dim = shape
        codes_at = self._scale_bytes(shape)
        scales = rows[:, :codes_at].contiguous().view(torch.bfloat16).view(-1, heads, 2, 1, dim).float()
        codes = rows[:, codes_at:].view(-1, heads, tokens, dim).float()
        most = torch.finfo(dtype).max
        return (scales[:, :, 1] + scales[:, :, 0] * codes).clamp(-most, most).to(dtype)

    @staticmethod
    def _scale_bytes(shape: tuple[int, int, int]) -> int:
        heads, _, head_dim = shape
        return heads * 2 * head_dim * 2


def _cut(x: torch.Tensor, *, up: bool) -> torch.Tensor:
    """Return the nearest bfloat16 not above finite `x`, or not below it if `up`, as float32."""
    import torch  # noqa: PLC0415

    bits = x.contiguous().view(torch.int32)
    cut = bits & -0x10000
    # Cutting rounds towards zero, which is right for one sign only.
    is_wrong = (bits != cut) & ((x < 0) != up)
    return (cut + is_wrong.int() * 0x10000).view(torch.float32)
