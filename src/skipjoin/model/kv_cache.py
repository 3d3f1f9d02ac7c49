from __future__ import annotations

import torch

from skipjoin.kv_format import CACHE_FORMATS, CacheFormat, SwapFormat
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.page_locked import cpu_bytes
from skipjoin.model.parallel import WHOLE, Shard
from skipjoin.model.state_cache import StateCache

AUTO = CACHE_FORMATS["auto"]
# Index of blocks, or of blocks and slots.
Where = tuple[torch.Tensor | slice, ...]


def cache_format_of(kv_cache_dtype: str, config: ModelConfig) -> CacheFormat:
    if kv_cache_dtype not in CACHE_FORMATS:
        raise ModelError(f"kv_cache_dtype must be one of {', '.join(CACHE_FORMATS)}; got {kv_cache_dtype!r}")
    found = CACHE_FORMATS[kv_cache_dtype]
    if (why := found.why_not(config.head_dim)) is not None:
        raise ModelError(f"kv_cache_dtype {kv_cache_dtype} needs {why}: leave kv_cache_dtype auto")
    if found.is_rounded and config.has_position_keys:
        raise ModelError(
            f"kv_cache_dtype {kv_cache_dtype} rounds keys, and those of {config.architecture} have positions: leave "
            "kv_cache_dtype auto"
        )
    return found


class PagedKV:
    """Paged KV cache of a rank's layers and KV heads.

    `tensor` is contiguous, [num_blocks, numbers], so that a move is one copy per block. For each layer, a block has
    [2, kv_heads, block_size, row], or [1, ...] where one row is key and value. Blocks are not cleared on reuse, so
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
        of: CacheFormat = AUTO,
        pin: bool = False,
        shard: Shard = WHOLE,
        state_slots: int = 1,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.states: StateCache | None = None
        if config.states is not None:
            self.states = StateCache(state_slots, config, dtype, device, pin=pin, shard=shard)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.format = of
        storage: torch.dtype = getattr(torch, of.storage) if of.storage else dtype
        heads = kv_heads(config, shard)
        self._dims = [dim for _, dim in heads]
        rows = config.kv_rows
        sizes = [rows * count * block_size * of.row(dim) for count, dim in heads]
        if torch.device(device).type == "cpu":
            size = num_blocks * self.bytes_per_block(config, block_size, dtype, shard, of)
            self.tensor = cpu_bytes(self, size, pin=pin).view(storage).view(num_blocks, -1)
        else:
            self.tensor = torch.zeros((num_blocks, sum(sizes)), dtype=storage, device=device)
        parts = [
            part.unflatten(1, (rows, count, block_size, -1))
            for part, (count, _) in zip(self.tensor.split(sizes, dim=1), heads, strict=True)
        ]
        self._row = parts[0].shape[-1] if len({*heads}) == 1 else 0
        self._rows = [*map(_keys_and_values, parts)]
        # Per layer [num_blocks, block_size, kv_heads, head_dim]: kernels use the strides.
        self._layers = [_keys_and_values(part[..., :dim]) for part, dim in zip(parts, self._dims, strict=True)]
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        if of.has_scale:
            self._scales = [_keys_and_values(part.view(torch.float32)[..., -1]) for part in parts]
        self._parts = parts

    @property
    def block_bytes(self) -> int:
        return self.tensor[0].numel() * self.tensor.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return strided views [num_blocks, block_size, kv_heads, head_dim], for `readers` of the format only."""
        return self._layers[index]

    def scales(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return views of a layer's scales, [num_blocks, block_size, kv_heads] each, or None."""
        return self._scales[index] if self.format.has_scale else None

    def write(self, index: int, where: Where, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write keys and values, [..., kv_heads, head_dim] each, to a layer's blocks and slots `where`."""
        for stored, new in zip(self._rows[index], rows, strict=True):
            stored[where] = self.format.quantize(new)

    def read(self, index: int, where: Where, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (self.format.dequantize(part[where], self._dims[index], dtype) for part in self._rows[index])
        return keys, values

    def block_view(self) -> torch.Tensor:
        return self.tensor

    def head_views(self) -> list[torch.Tensor]:
        """Return views [num_blocks, heads, block_size, row] that have all heads, one if all are of one width."""
        return [self.head_view()] if self._row else [part.flatten(1, 2) for part in self._parts]

    def head_view(self) -> torch.Tensor:
        """Return all heads, [num_blocks, heads, block_size, row], of a model whose heads are of one width."""
        return self.tensor.view(self.num_blocks, -1, self.block_size, self._row)

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, block_size: int, dtype: torch.dtype, shard: Shard = WHOLE, of: CacheFormat = AUTO
    ) -> int:
        rows = (config.kv_rows * count * of.row_bytes(dim, dtype.itemsize) for count, dim in kv_heads(config, shard))
        return block_size * sum(rows)


class SwapPool:
    """Blocks in CPU memory in another format, of a `shape` (heads, block_size, head_dim)."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        config: ModelConfig,
        of: SwapFormat,
        *,
        pin: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks, self.format = num_blocks, of
        self.shape = (2 * sum(count for count, _ in kv_heads(config, shard)), block_size, config.head_dim)
        self.block_bytes = of.block_bytes(self.shape, 0)
        self.tensor = cpu_bytes(self, num_blocks * self.block_bytes, pin=pin).view(num_blocks, self.block_bytes)

    def block_view(self) -> torch.Tensor:
        return self.tensor


def _keys_and_values(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return part[:, 0].transpose(1, 2), part[:, -1].transpose(1, 2)


def kv_heads(config: ModelConfig, shard: Shard) -> list[tuple[int, int]]:
    """Return the number and width of a rank's KV heads in each of its layers that have KV.

    Models without attention have blocks to count tokens.
    """
    layers = [] if config.is_encoder else shard.kv_layers(config)
    if config.layer_heads:
        return [config.heads_of(layer) for layer in layers]
    return [(len(shard.kv_heads(config)), config.head_dim)] * len(layers) or [(1, config.head_dim)]
