from __future__ import annotations

import math
import weakref

import torch

from skipjoin.model.config import ModelConfig
from skipjoin.model.large_pages import large_page_bytes
from skipjoin.model.page_locked import page_locked_bytes
from skipjoin.model.parallel import WHOLE, Shard


class PagedKV:
    """Paged KV cache of a rank's layers and KV heads.

    `tensor` is contiguous, [num_blocks, layers, 2, kv_heads, block_size, head_dim], so that a move is one copy per
    block. Blocks are not cleared on reuse, so attention must not read slots beyond a sequence's length.
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
        shape = (num_blocks, layers, 2, kv_heads, block_size, config.head_dim)
        if torch.device(device).type == "cpu":
            size = num_blocks * self.bytes_per_block(config, block_size, dtype, shard)
            self.tensor = _cpu_bytes(self, size, pin=pin).view(dtype).view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        # Per layer [num_blocks, block_size, kv_heads, head_dim]: kernels use the strides.
        self._layers = [
            (self.tensor[:, i, 0].transpose(1, 2), self.tensor[:, i, 1].transpose(1, 2)) for i in range(layers)
        ]

    @property
    def block_bytes(self) -> int:
        return self.tensor[0].numel() * self.tensor.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return strided views of this cache's layer `index`, [num_blocks, block_size, kv_heads, head_dim] each."""
        return self._layers[index]

    def block_view(self) -> torch.Tensor:
        """Return [num_blocks, elements per block]."""
        return self.tensor.view(self.num_blocks, -1)

    def head_view(self) -> torch.Tensor:
        """Return [num_blocks, heads, block_size, head_dim], with heads of keys and values of all layers."""
        return self.tensor.view(self.num_blocks, -1, *self.tensor.shape[-2:])

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype, shard: Shard = WHOLE) -> int:
        layers, kv_heads = len(shard.layers(config)), len(shard.kv_heads(config))
        return layers * 2 * kv_heads * block_size * config.head_dim * torch.empty((), dtype=dtype).element_size()


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


def _heads(config: ModelConfig, shard: Shard) -> int:
    return len(shard.layers(config)) * 2 * len(shard.kv_heads(config))


def _cpu_bytes(pool: PagedKV | QuantizedKV, size: int, *, pin: bool) -> torch.Tensor:
    if not pin:
        return large_page_bytes(size)
    memory, unlock = page_locked_bytes(size)
    # Unlocked with the pool, not at exit, since the end of the process unlocks everything.
    weakref.finalize(pool, unlock).atexit = False
    return memory
