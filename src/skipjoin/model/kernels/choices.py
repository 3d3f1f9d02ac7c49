from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from skipjoin.model.attention.base import Softmax
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.cuda import is_out_of_memory
from skipjoin.model.kernels import decode_attention as decode
from skipjoin.model.kernels import paged, tuning
from skipjoin.model.kernels import prefill_attention as prefill
from skipjoin.model.kernels.tuning import Config, TunedTable, source_hash

# Covers the measurement too: choices measured in another way are ignored.
_SOURCES = source_hash(*(str(module.__file__) for module in (paged, decode, prefill, tuning)), __file__)
# Measured numbers of sequences in a decode and of tokens in a prompt, and the keys per sequence.
_DECODES, _PROMPTS, _CONTEXT = (1, 4, 16, 64, 256), (8, 4096), 1024
# Pairs of sequence and KV head up to which shorter chunks are measured, because they may leave multiprocessors idle,
# and from which longer ones are, because they fill these without any partial results to add up.
_FEW, _MANY, _SHORT_CHUNK, _LONG_CHUNK = 32, 256, 64, 1024
# Minimum and maximum number of calls that are timed together. Each reads other keys than the previous ones, and
# together they read more than the device's caches hold. No call finds its keys there, as in a step, in which other
# layers run in between.
_CALLS, _MAX_CALLS, _CACHES_FILLED = 20, 512, 2
# Memory of the measured KV, in bytes.
_POOL_BYTES = 2 << 30

_log = logging.getLogger(__name__)


class Shape(NamedTuple):
    dtype: torch.dtype
    group: int
    dim: int
    block_size: int
    wgmma: bool = True

    @property
    def key(self) -> tuple[object, ...]:
        return (str(self.dtype).removeprefix("torch."), self.group, self.dim, self.block_size)


def decode_choice(shape: Shape, work: int) -> tuple[str, str, Sequence[object], list[dict[str, int]]]:
    bucket = 1
    while bucket < work:  # powers of four share one choice
        bucket *= 4
    configs = decode.decode_configs(shape.group, shape.dim, shape.dtype.itemsize)
    if bucket <= _FEW:
        configs += [config | {"CHUNK": _SHORT_CHUNK} for config in configs[:1]]
    if bucket >= _MANY:
        configs += [config | {"CHUNK": _LONG_CHUNK} for config in configs[:2]]
    return "decode", _SOURCES, (*shape.key, bucket), configs


def prefill_choice(shape: Shape, longest: int) -> tuple[str, str, Sequence[object], list[dict[str, int]]]:
    rows = longest * shape.group
    configs = prefill.prefill_configs(shape.group, shape.dim, shape.dtype.itemsize, rows, wgmma=shape.wgmma)
    return "prefill", _SOURCES, (*shape.key, "short" if rows <= prefill.SHORT_ROWS else "long"), configs


def distinct_batches(
    group: int, kv_heads: int, block_size: int, seqs: int, positions: int
) -> list[tuple[tuple[int, ...], int]]:
    widest = -(-positions // block_size)
    bucket, most = 1, 0
    batches: list[tuple[int, ...]] = []
    while most < seqs:
        least, most = most + 1, min(seqs, bucket // kv_heads)
        if most >= least:
            batches.append((1,) * least)
        bucket *= 4
    for length in (2, prefill.SHORT_ROWS // group + 1):
        if length <= positions:
            batches += [(length,), (1, length)][:seqs]
    return [(batch, widest) for batch in batches]


def tune_attention(
    table: TunedTable, shape: Shape, kv_heads: int, device: torch.device, processors: int, cache_bytes: int
) -> None:
    bench = _Bench(table, shape, kv_heads, device, cache_bytes)
    for measure, sizes in ((bench.decode, _DECODES), (bench.prefill, _PROMPTS)):
        for size in sizes:
            try:
                measure(size, processors)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                first = str(error).partition("\n")[0]
                _log.warning("too little memory to measure kernel sizes; the default sizes are used: %s", first)
                return


class _Bench:
    def __init__(self, table: TunedTable, shape: Shape, kv_heads: int, device: torch.device, cache_bytes: int) -> None:
        self._table, self._shape, self._kv_heads = table, shape, kv_heads
        self._device, self._cache_bytes = device, cache_bytes

    def decode(self, count: int, processors: int) -> None:
        shape, choice = self._shape, decode_choice(self._shape, count * self._kv_heads)
        if self._table.known(*choice[:3]):
            return
        context = min(_CONTEXT, _POOL_BYTES // (count * self._token_bytes))
        turns, slices = self._turns(count * context)
        width = -(-context // shape.block_size)
        # Blocks as scattered as on a server.
        blocks = torch.randperm(slices * count * width, generator=torch.Generator().manual_seed(0)).tolist()
        tables = [blocks[i * width : (i + 1) * width] for i in range(slices * count)]
        batches = [
            PackedBatch.build(
                [Segment([0], context - 1, table) for table in tables[i : i + count]], shape.block_size, self._device
            )
            for i in range(0, len(tables), count)
        ]
        query, (keys, values) = self._query(count), self._cache(len(blocks))
        out = torch.empty_like(query)
        # The layers of a pass share the list, so it is not measured. It is the same for all slices.
        sizes = {config["CHUNK"] for config in choice[3]}
        works = {size: decode.share_out(batches[0], window=0, chunk=size) for size in sizes}
        options: dict[str, Any] = {"softmax": Softmax(shape.dim**-0.5), "processors": processors}

        def run(config: Config, turn: int) -> None:
            tables, work = batches[turn % slices].block_tables, works[config["CHUNK"]]
            decode.decode_attention(out, query, keys, values, None, tables, work, config=config, **options)

        self._table.measure(*choice, run, turns)

    def prefill(self, length: int, processors: int) -> None:
        shape, choice = self._shape, prefill_choice(self._shape, length)
        if self._table.known(*choice[:3]):
            return
        turns, slices = self._turns(length + _CONTEXT)
        width = -(-(length + _CONTEXT) // shape.block_size)
        batches = [
            PackedBatch.build(
                [Segment([0] * length, _CONTEXT, range(i * width, (i + 1) * width))], shape.block_size, self._device
            )
            for i in range(slices)
        ]
        query, (keys, values) = self._query(length), self._cache(slices * width)
        out = torch.empty_like(query)
        tiles = {
            side: torch.from_numpy(prefill.query_tiles(batches[0], [0], side // shape.group)).to(self._device)
            for side in {config["BLOCK_M"] for config in choice[3]}
        }
        options: dict[str, Any] = {"softmax": Softmax(shape.dim**-0.5), "window": 0}

        def run(config: Config, turn: int) -> None:
            batch, tile = batches[turn % slices], tiles[config["BLOCK_M"]]
            prefill.prefill_attention(out, query, keys, values, None, batch, tile, config=config, **options)

        self._table.measure(*choice, run, turns)

    @property
    def _token_bytes(self) -> int:
        return 2 * self._kv_heads * self._shape.dim * self._shape.dtype.itemsize

    def _turns(self, tokens: int) -> tuple[int, int]:
        size = tokens * self._token_bytes
        turns = min(_MAX_CALLS, max(_CALLS, -(-_CACHES_FILLED * self._cache_bytes // size)))
        return turns, max(1, min(turns, _POOL_BYTES // size))

    def _query(self, tokens: int) -> torch.Tensor:
        shape = self._shape
        return torch.randn(tokens, shape.group * self._kv_heads, shape.dim, dtype=shape.dtype, device=self._device)

    def _cache(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._shape
        size = (blocks, 2, self._kv_heads, shape.block_size, shape.dim)
        pools = torch.randn(size, dtype=shape.dtype, device=self._device)
        return pools[:, 0].transpose(1, 2), pools[:, 1].transpose(1, 2)
