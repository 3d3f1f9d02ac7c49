"""The sizes that the attention kernels run with, and the measurement that chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.kernels import decode_attention as decode
from skipjoin.model.kernels import paged
from skipjoin.model.kernels import prefill_attention as prefill
from skipjoin.model.kernels.tuning import Config, TunedTable, source_hash

_SOURCES = source_hash(*(str(module.__file__) for module in (paged, decode, prefill)))
# Measured numbers of sequences of a decode and of tokens of a prompt, and the keys per sequence.
_DECODES, _PROMPTS, _CONTEXT = (1, 4, 16, 64, 256), (8, 4096), 1024
# Memory of the measured caches, in bytes; far more than the device's caches hold.
_CACHE_BYTES = 2 << 30


class Shape(NamedTuple):
    """The attention shape that a kernel is compiled for. group: query heads per key-value head."""

    dtype: torch.dtype
    group: int
    dim: int
    block_size: int

    @property
    def key(self) -> tuple[object, ...]:
        return (str(self.dtype).removeprefix("torch."), self.group, self.dim, self.block_size)


def decode_choice(shape: Shape, work: int) -> tuple[str, str, Sequence[object], list[dict[str, int]]]:
    """The arguments of `TunedTable.find` for decodes. work: sequences times key-value heads."""
    bucket = 1
    while bucket < work:  # powers of four share one choice
        bucket *= 4
    configs = decode.decode_configs(shape.group, shape.dim, shape.dtype.itemsize)
    return "decode", _SOURCES, (*shape.key, bucket), configs


def prefill_choice(shape: Shape, longest: int) -> tuple[str, str, Sequence[object], list[dict[str, int]]]:
    """The arguments of `TunedTable.find` for other segments. longest: tokens of the longest."""
    rows = longest * shape.group
    configs = prefill.prefill_configs(shape.group, shape.dim, shape.dtype.itemsize, rows)
    return "prefill", _SOURCES, (*shape.key, "short" if rows <= prefill.SHORT_ROWS else "long"), configs


def tune_attention(table: TunedTable, shape: Shape, kv_heads: int, device: torch.device, processors: int) -> None:
    """Measure the choices for this shape that `table` lacks. Takes seconds, mostly compilation. For CUDA devices."""
    heads = shape.group * kv_heads
    options: dict[str, Any] = {"scale": shape.dim**-0.5, "window": 0}

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=shape.dtype, device=device)

    def cache_of(tokens: int) -> list[torch.Tensor]:
        pools = drawn(-(-tokens // shape.block_size), 2, kv_heads, shape.block_size, shape.dim)
        return [pools[:, i].transpose(1, 2) for i in range(2)]

    for count in _DECODES:
        choice = decode_choice(shape, count * kv_heads)
        if table.known(*choice[:3]):
            continue
        context = min(_CONTEXT, _CACHE_BYTES // (count * 2 * kv_heads * shape.dim * shape.dtype.itemsize))
        batch, cache = (
            _decode_batch(count, context, shape.block_size, device),
            cache_of(count * (context + shape.block_size)),
        )
        query = drawn(count, heads, shape.dim)
        out, slots = torch.empty_like(query), batch.block_tables.shape[1] * shape.block_size
        splits = decode.choose_splits(count, kv_heads, slots, processors)

        def run_decode(config: Config, out=out, query=query, cache=cache, batch=batch, splits=splits) -> None:
            decode.decode_attention(out, query, *cache, batch, splits=splits, config=config, **options)

        table.measure(*choice, run_decode)
    for length in _PROMPTS:
        choice = prefill_choice(shape, length)
        if table.known(*choice[:3]):
            continue
        blocks = list(range(-(-(length + _CONTEXT) // shape.block_size)))
        batch = PackedBatch.build([Segment([0] * length, _CONTEXT, blocks)], shape.block_size, device)
        cache = cache_of(length + _CONTEXT)
        query = drawn(length, heads, shape.dim)
        out = torch.empty_like(query)

        tiles = {
            side: torch.from_numpy(prefill.query_tiles(batch, [0], side // shape.group)).to(device)
            for side in {config["BLOCK_M"] for config in choice[3]}
        }

        def run_prefill(config: Config, out=out, query=query, cache=cache, batch=batch, tiles=tiles) -> None:
            prefill.prefill_attention(out, query, *cache, batch, tiles[config["BLOCK_M"]], config=config, **options)

        table.measure(*choice, run_prefill)


def _decode_batch(count: int, context: int, block_size: int, device: torch.device) -> PackedBatch:
    """Sequences of `context` keys whose blocks are as scattered as on a server."""
    width = -(-context // block_size)
    blocks = torch.randperm(count * width, generator=torch.Generator().manual_seed(0)).tolist()
    segments = [Segment([0], context - 1, blocks[i * width : (i + 1) * width]) for i in range(count)]
    return PackedBatch.build(segments, block_size, device)
