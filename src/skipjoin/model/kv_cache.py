from __future__ import annotations

import math
import weakref

import torch

from skipjoin.model.config import ModelConfig, ModelError
from skipjoin.model.int8_rows import SCALE_BYTES, dequantize, quantize
from skipjoin.model.large_pages import large_page_bytes
from skipjoin.model.page_locked import page_locked_bytes
from skipjoin.model.parallel import WHOLE, Shard

KV_CACHE_DTYPES = ("auto", "int8")
# Index of blocks, or of blocks and slots.
Where = tuple[torch.Tensor | slice, ...]


def kv_dtype_of(kv_cache_dtype: str, dtype: torch.dtype, config: ModelConfig) -> torch.dtype:
    """Return the type of a model's cache; raise `ModelError` if it cannot have it."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ModelError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}; got {kv_cache_dtype!r}")
    if kv_cache_dtype == "auto":
        return dtype
    if config.head_dim % SCALE_BYTES:
        raise ModelError(
            f"kv_cache_dtype int8 needs a head_dim that is a multiple of {SCALE_BYTES}, the model has "
            f"{config.head_dim}: leave kv_cache_dtype auto"
        )
    return torch.int8


class PagedKV:
    """Paged KV cache of a rank's layers and KV heads.

    `tensor` is contiguous, [num_blocks, layers, 2, kv_heads, block_size, row], so that a move is one copy per block. A
    row has head_dim numbers, and in a cache of int8 their float32 scale after them. Blocks are not cleared on reuse, so
    attention must not read slots beyond a sequence's length.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        pin: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        layers, kv_heads = len(shard.layers(config)), len(shard.kv_heads(config))
        shape = (num_blocks, layers, 2, kv_heads, block_size, _row(config, dtype))
        if torch.device(device).type == "cpu":
            size = num_blocks * self.bytes_per_block(config, block_size, dtype, shard)
            self.tensor = _cpu_bytes(self, size, pin=pin).view(dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.is_quantized = dtype == torch.int8
        # Per layer [num_blocks, block_size, kv_heads, head_dim]: kernels use the strides.
        self._layers = _by_layer(self.tensor[..., : config.head_dim])
        self._scales = _by_layer(self.tensor.view(torch.float32)[..., -1]) if self.is_quantized else []

    @property
    def block_bytes(self) -> int:
        return self.tensor[0].numel() * self.tensor.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return strided views of this cache's layer `index`, [num_blocks, block_size, kv_heads, head_dim] each."""
        return self._layers[index]

    def scales(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return views of a layer's scales, [num_blocks, block_size, kv_heads] each; None if it is not int8."""
        return self._scales[index] if self.is_quantized else None

    def write(self, index: int, where: Where, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write keys and values, [..., kv_heads, head_dim] each, to a layer's blocks and slots `where`."""
        of_rows = self.scales(index) or (None, None)
        for numbers, scales, new in zip(self.layer(index), of_rows, rows, strict=True):
            if scales is None:
                numbers[where] = new
            else:
                numbers[where], scales[where] = quantize(new)

    def read(self, index: int, where: Where, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer's blocks, or blocks and slots, `where`; those of int8 as `dtype`."""
        keys, values = self.layer(index)
        if (scales := self.scales(index)) is None:
            return keys[where], values[where]
        of_keys, of_values = scales
        return dequantize(keys[where], of_keys[where], dtype), dequantize(values[where], of_values[where], dtype)

    def block_view(self) -> torch.Tensor:
        """Return [num_blocks, elements per block]."""
        return self.tensor.view(self.num_blocks, -1)

    def head_view(self) -> torch.Tensor:
        """Return [num_blocks, heads, block_size, row], with heads of keys and values of all layers."""
        return self.tensor.view(self.num_blocks, -1, *self.tensor.shape[-2:])

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype, shard: Shard = WHOLE) -> int:
        layers, kv_heads = len(shard.layers(config)), len(shard.kv_heads(config))
        return layers * 2 * kv_heads * block_size * _row(config, dtype) * dtype.itemsize


# Largest code of a quantized number.
CODE_LEVELS = 255


class QuantizedKV:
    """Blocks in CPU memory with 8 bits per number, in the format of `model.ops.block_quant`.

    `tensor` is uint8 [num_blocks, block_bytes]. A row holds the scales and minima of all channels, bfloat16 [heads, 2,
    head_dim], then the codes, uint8 [heads, block_size, head_dim]. The heads are those of keys and values of all
    layers. `shape` is (heads, block_size, head_dim).
    """

    def __init__(
        self, num_blocks: int, block_size: int, config: ModelConfig, *, pin: bool = False, shard: Shard = WHOLE
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.shape = (_heads(config, shard), block_size, config.head_dim)
        self.block_bytes = self.bytes_per_block(config, block_size, shard)
        self.tensor = _cpu_bytes(self, num_blocks * self.block_bytes, pin=pin).view(num_blocks, self.block_bytes)

    def block_view(self) -> torch.Tensor:
        return self.tensor

    @staticmethod
    def scale_bytes(shape: tuple[int, int, int]) -> int:
        heads, _, head_dim = shape
        return heads * 2 * head_dim * torch.bfloat16.itemsize

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_size: int, shard: Shard = WHOLE) -> int:
        """Return the bytes of a row: 0.625 of bfloat16 with 16 tokens per block, 0.5625 with 32."""
        shape = (_heads(config, shard), block_size, config.head_dim)
        return cls.scale_bytes(shape) + math.prod(shape)


def _row(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def _by_layer(tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of each layer, [num_blocks, block_size, kv_heads, ...]."""
    return [(tensor[:, i, 0].transpose(1, 2), tensor[:, i, 1].transpose(1, 2)) for i in range(tensor.shape[1])]


def _heads(config: ModelConfig, shard: Shard) -> int:
    return len(shard.layers(config)) * 2 * len(shard.kv_heads(config))


def _cpu_bytes(pool: PagedKV | QuantizedKV, size: int, *, pin: bool) -> torch.Tensor:
    if not pin:
        return large_page_bytes(size)
    memory, unlock = page_locked_bytes(size)
    # Unlocked with the pool, not at exit, since the end of the process unlocks everything.
    weakref.finalize(pool, unlock).atexit = False
    return memory
