from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from skipjoin.model.transfer import to_device


class Segment(NamedTuple):
    """Consecutive new tokens of one sequence.

    Attributes:
        blocks: Block table for at least start + length slots.
        sample: Compute the logits of the last token, or of every token with `all_logits`.
        awaits: Row of the previous step's sampled tokens that holds one more token.
        reverse: Fill blocks from the last slot down, so that two sequences can share a block.
        captures: Ascending numbers of tokens after which the state is copied, and the target slots.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool = True
    all_logits: bool = False
    awaits: int | None = None
    reverse: bool = False
    adapter: int = 0
    state: int = 0
    captures: Sequence[tuple[int, int]] = ()

    @property
    def length(self) -> int:
        return len(self.tokens) + (self.awaits is not None)


class GraphBuffers:
    """Fixed device tensors for decodes, so that CUDA graphs can be replayed with new contents."""

    def __init__(self, capacity: int, tables: torch.Tensor) -> None:
        self.capacity, self.width = capacity, tables.shape[1]
        self.tables = tables[:capacity]
        # Without the tables, which have a tensor of their own.
        bounds = _bounds(capacity, capacity, 0, 0)
        self.buffer = torch.empty(bounds[-1], dtype=torch.int64, device=tables.device)
        self._parts = _Parts(*(self.buffer[a:b] for a, b in pairwise(bounds)))

    def place(self, flat: torch.Tensor, tables: torch.Tensor) -> tuple[_Parts, torch.Tensor]:
        self.buffer.copy_(flat[: len(self.buffer)])
        self.tables[:, : tables.shape[1]].copy_(tables)
        return self._parts, self.tables

    def holds(self, segments: Sequence[Segment]) -> bool:
        return len(segments) <= self.capacity and all(
            segment.length == 1 and segment.sample and len(segment.blocks) <= self.width and not segment.adapter
            for segment in segments
        )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """n segments with T tokens in total, concatenated.

    Index tensors are int64 on the batch's device. Position p of a sequence lies in block p // block_size of its table,
    slot p % block_size, counted from the block's end if reversed.

    Attributes:
        slots: Shape [T], block * block_size + slot; -1 for padding, whose KV is not written.
        sources: Shape [T], row of the previous step's sampled tokens, or -1; None if all tokens are known.
        context_lens: Shape [n], tokens with KV after this step; 0 for padding.
        block_tables: Shape [n, widest], padded with 0.
        logit_rows: Shape [rows], tokens whose logits are wanted; None for all.
        row_starts: Rows of segment i are row_starts[i]:row_starts[i + 1].
        directed: Indexes of the reversed segments.
        types: Shape [T], token types of an encoder; None if all are 0.
        adapters: Number of each segment's adapter, 0 for none; empty if none has one.
        captures: Snapshots (segment, tokens, slot), ascending.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor | None
    query_start: torch.Tensor
    context_lens: torch.Tensor
    reversed: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor | None
    row_starts: list[int]
    starts: list[int]
    lengths: list[int]
    max_context: int
    max_block: int
    block_size: int
    directed: Sequence[int] = ()
    types: torch.Tensor | None = None
    adapters: Sequence[int] = ()
    states: Sequence[int] = ()
    captures: Sequence[tuple[int, int, int]] = ()

    @property
    def plain(self) -> bool:
        return not self.directed

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def decode_only(self) -> bool:
        return self.num_tokens == len(self.lengths)

    def fill_in(self, sampled: torch.Tensor) -> None:
        if self.sources is not None:
            found = sampled[self.sources.clamp(min=0)]
            self.token_ids.copy_(torch.where(self.sources < 0, self.token_ids, found))

    @classmethod
    def build(
        cls,
        segments: Sequence[Segment],
        block_size: int,
        device: torch.device | str = "cpu",
        *,
        graph_buffers: GraphBuffers | None = None,
    ) -> PackedBatch:
        n = len(segments)
        if n and graph_buffers is None and all(map(_is_plain_decode, segments)):
            return cls._of_decodes(segments, block_size, torch.device(device))
        lengths, starts = [s.length for s in segments], [s.start for s in segments]
        if n == 0 or min(lengths) == 0:
            raise ValueError("a batch needs at least one segment, and a segment at least one token")
        lens, first = np.array((lengths, starts), np.int64)
        held = np.fromiter((len(s.blocks) for s in segments), np.int64, n)
        if first.min() < 0:
            raise ValueError(f"segment {first.argmin()} starts at {first.min()}")
        context = first + lens
        directed = [i for i, s in enumerate(segments) if s.reverse]
        _check_tables(context, held, block_size)
        tokens = int(lens.sum())
        rows, row_starts = _wanted_rows(segments, lengths, tokens)
        empty, width = 0, int(held.max())
        if graph_buffers is not None:
            if n > graph_buffers.capacity or tokens > n or rows is not None or width > graph_buffers.width:
                raise ValueError(
                    f"the graph buffers hold {graph_buffers.capacity} decodes, with tables of "
                    f"{graph_buffers.width} blocks"
                )
            empty = graph_buffers.capacity - n
        # One buffer, so that a single copy transfers it to the device.
        bounds = _bounds(tokens + empty, n + empty, width, len(rows or ()))
        flat = np.zeros(bounds[-1], np.int64)
        to = _Parts(*(flat[a:b] for a, b in pairwise(bounds)))
        np.cumsum(lens, out=to.query_start[1 : n + 1])
        to.query_start[n + 1 :] = np.arange(tokens + 1, tokens + empty + 1)
        to.context_lens[:n] = context
        to.token_ids[:tokens] = np.fromiter(chain.from_iterable(map(_token_ids, segments)), np.int64, tokens)
        tables = to.tables.reshape(n + empty, width)
        _fill_tables(tables[:n], segments, held)
        owner = np.repeat(np.arange(n), lens)
        to.positions[:tokens] = np.arange(tokens) + (first - to.query_start[:n])[owner]
        to.reversed[directed] = 1
        to.slots[:tokens], to.slots[tokens:] = _slots(to, tables, owner, block_size), -1
        pending_samples = _fill_sources(to, segments)
        to.wanted[:] = rows or ()
        buffer = to_device(torch.from_numpy(flat), torch.device(device))
        parts = _Parts(*(buffer[a:b] for a, b in pairwise(bounds)))
        block_tables = parts.tables.view(n + empty, width)
        if graph_buffers is not None:
            parts, block_tables = graph_buffers.place(buffer, block_tables)
        return cls(
            *parts[:3],
            parts.sources if pending_samples or graph_buffers is not None else None,
            *parts[4:7],
            block_tables,
            None if rows is None else parts.wanted,
            row_starts=[*row_starts, *range(n + 1, n + empty + 1)],
            starts=starts + [0] * empty,
            lengths=lengths + [1] * empty,
            max_context=int(context.max()),
            max_block=int(tables.max()),
            block_size=block_size,
            directed=directed,
            adapters=_adapters(segments),
            states=[segment.state for segment in segments] + [0] * empty,
            captures=[(i, *capture) for i, segment in enumerate(segments) for capture in segment.captures],
        )

    @classmethod
    def _of_decodes(cls, segments: Sequence[Segment], block_size: int, device: torch.device) -> PackedBatch:
        n = len(segments)
        width = max(len(segment.blocks) for segment in segments)
        tokens, starts, slots, sources = [], [], [], []
        tables: list[Sequence[int]] = []
        for i, (known, start, blocks, _, _, awaits, *_) in enumerate(segments):
            held = len(blocks)
            if start < 0:
                raise ValueError(f"segment {i} starts at {start}")
            if start >= held * block_size:
                raise ValueError(f"segment {i} needs {start + 1} slots, its blocks have {held * block_size}")
            tokens.append(known[0] if awaits is None else 0)
            starts.append(start)
            slots.append(blocks[start // block_size] * block_size + start % block_size)
            sources.append(-1 if awaits is None else awaits)
            tables.append(blocks)
            if held < width:
                tables.append((0,) * (width - held))
        contexts = [start + 1 for start in starts]
        sizes = _sizes(n, n, width, 0)
        # In the order of `_Parts`; the zeros are directions.
        numbers = chain(tokens, starts, slots, sources, range(n + 1), contexts, repeat(0, n), *tables)
        flat = np.fromiter(numbers, np.int64, sum(sizes))
        in_tables = flat[-n * width :]
        if (lowest := int(in_tables.min())) < 0:
            raise ValueError(f"block {lowest} does not exist")
        parts = _Parts(*to_device(torch.from_numpy(flat), device).split_with_sizes(sizes))
        return cls(
            *parts[:3],
            parts.sources if any(segment.awaits is not None for segment in segments) else None,
            *parts[4:7],
            parts.tables.view(n, width),
            None,
            row_starts=list(range(n + 1)),
            starts=starts,
            lengths=[1] * n,
            max_context=max(contexts),
            max_block=int(in_tables.max()),
            block_size=block_size,
            adapters=_adapters(segments),
            states=[segment.state for segment in segments],
            captures=[(i, *capture) for i, segment in enumerate(segments) for capture in segment.captures],
        )


def chunked(batch: PackedBatch, size: int) -> PackedBatch:
    """Return a batch in which each chunk of `size` positions is a sequence of its own. None may end within a block."""
    ends = [start + length for start, length in zip(batch.starts, batch.lengths, strict=True)]
    if max(ends) <= size:
        return batch
    segments = []
    for index, (start, end, table) in enumerate(zip(batch.starts, ends, batch.block_tables.tolist(), strict=True)):
        for first in range(start - start % size, end, size):
            begin, stop = max(start, first), min(end, first + size)
            blocks = table[first // batch.block_size : -(-stop // batch.block_size)]
            tokens = [0] * (stop - begin)
            segments.append(Segment(tokens, begin - first, blocks, reverse=index in batch.directed))
    return PackedBatch.build(segments, batch.block_size, batch.positions.device)


class _Parts(NamedTuple):
    token_ids: Any
    positions: Any
    slots: Any
    sources: Any
    query_start: Any
    context_lens: Any
    reversed: Any
    tables: Any
    wanted: Any


def _sizes(tokens: int, segments: int, width: int, rows: int) -> _Parts:
    return _Parts(tokens, tokens, tokens, tokens, segments + 1, segments, segments, segments * width, rows)


def _bounds(tokens: int, segments: int, width: int, rows: int) -> list[int]:
    return list(accumulate(_sizes(tokens, segments, width, rows), initial=0))


def _is_plain_decode(segment: Segment) -> bool:
    tokens, _, _, sample, all_logits, awaits, reverse, *_ = segment
    return (sample or all_logits) and not reverse and len(tokens) + (awaits is not None) == 1


def _adapters(segments: Sequence[Segment]) -> Sequence[int]:
    found = [segment.adapter for segment in segments]
    return found if any(found) else ()


def _fill_tables(tables: np.ndarray, segments: Sequence[Segment], held: np.ndarray) -> None:
    in_table = chain.from_iterable(s.blocks for s in segments)
    tables[np.arange(tables.shape[1]) < held[:, None]] = np.fromiter(in_table, np.int64, int(held.sum()))
    if tables.min() < 0:
        raise ValueError(f"block {tables.min()} does not exist")


def _slots(to: _Parts, tables: np.ndarray, owner: np.ndarray, block_size: int) -> np.ndarray:
    block, slot = np.divmod(to.positions[: len(owner)], block_size)
    slot = np.where(to.reversed[owner], block_size - 1 - slot, slot)
    slots: np.ndarray = tables[owner, block] * block_size + slot
    return slots


def _fill_sources(to: _Parts, segments: Sequence[Segment]) -> bool:
    awaits = [(i, s.awaits) for i, s in enumerate(segments) if s.awaits is not None]
    to.sources[:] = -1
    for i, row in awaits:
        to.sources[to.query_start[i + 1] - 1] = row
    return bool(awaits)


def _token_ids(segment: Segment) -> Sequence[int]:
    return segment.tokens if segment.awaits is None else (*segment.tokens, 0)


def _check_tables(needed: np.ndarray, held: np.ndarray, block_size: int) -> None:
    short = np.flatnonzero(held * block_size < needed)
    if len(short):
        i = short[0]
        raise ValueError(f"segment {i} needs {needed[i]} slots, its blocks have {held[i] * block_size}")


def _wanted_rows(segments: Sequence[Segment], lengths: list[int], total: int) -> tuple[list[int] | None, list[int]]:
    rows: list[int] = []
    row_starts = [0]
    end = 0
    for segment, length in zip(segments, lengths, strict=True):
        end += length
        if segment.all_logits:
            rows.extend(range(end - length, end))
        elif segment.sample:
            rows.append(end - 1)
        row_starts.append(len(rows))
    return (None if len(rows) == total else rows), row_starts
