"""One step's work as flat tensors: the tokens of all sequences end to end, and where their KV lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from skipjoin.model.transfer import to_device


class Segment(NamedTuple):
    """Consecutive new tokens of one sequence.

    tokens: their ids. start: position of the first, which is also how many tokens already have KV.
    blocks: the sequence's block table, covering at least offset + start + length slots.
    sample: the logits of the last token are wanted. all_logits: those of every token are. awaits: one more token
    follows, which is not known here: the one in this row of what the step before sampled.
    offset: slots left out at the end of the first block where the sequence begins, in [0, block_size).
    reverse: blocks are filled from their last slot down, so that two sequences can share one from both ends.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool = True
    all_logits: bool = False
    awaits: int | None = None
    offset: int = 0
    reverse: bool = False

    @property
    def length(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens) + (self.awaits is not None)


class GraphBuffers:
    """A place on a device for batches of up to `seats` segments of one token each, whose tables have up to `width`
    blocks: every batch that is built in it has the same tensors, with other contents.

    Seats that stay empty have context 0 and slot -1, which is nowhere. tables: int64 [seats or more, width], which
    frames may share, if no batch of one is used after one of another was built: only as many columns as a batch has
    blocks are written, for they may be of a context far longer than any request has.
    """

    def __init__(self, seats: int, tables: torch.Tensor) -> None:
        self.seats, self.width = seats, tables.shape[1]
        self.tables = tables[:seats]
        # All but the tables.
        bounds = _bounds(seats, seats, 0, 0)
        self.buffer = torch.empty(bounds[-1], dtype=torch.int64, device=tables.device)
        self._parts = _Parts(*(self.buffer[a:b] for a, b in pairwise(bounds)))

    def place(self, flat: torch.Tensor, tables: torch.Tensor) -> tuple[_Parts, torch.Tensor]:
        """Take over a batch's buffer, and its tables, which are the buffer's end: parts and tables in their place."""
        self.buffer.copy_(flat[: len(self.buffer)])
        self.tables[:, : tables.shape[1]].copy_(tables)
        return self._parts, self.tables

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Whether a batch of these has its place here."""
        return len(segments) <= self.seats and all(
            segment.length == 1 and segment.sample and len(segment.blocks) <= self.width for segment in segments
        )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Segments packed end to end; n segments, T tokens. Index tensors are int64 on the batch's device.

    token_ids, positions, slots: [T]; a slot is block * block_size + its place in the block; -1: the token is padding,
    and its keys and values go nowhere. sources: [T], the row of the step before from which a token comes, -1 where it
    is known; None: all are.
    query_start: [n + 1], first token of each segment. context_lens: [n], tokens with KV after this step; 0: padding.
    offsets, reversed: [n], of the segments; 1: reversed. Position p of a sequence lies at i = offset + p: in block
    i // block_size of its table, slot i % block_size, counted from the block's end where reversed.
    block_tables: [n, widest], padded with 0. logit_rows: [rows], tokens whose logits are wanted, in order;
    None: all T. row_starts: rows of segment i are row_starts[i]:row_starts[i + 1].
    starts, lengths: per segment, as host lists. max_context: the longest context. max_block: the largest block.
    plain: no segment has an offset or is reversed.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor | None
    query_start: torch.Tensor
    context_lens: torch.Tensor
    offsets: torch.Tensor
    reversed: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor | None
    row_starts: list[int]
    starts: list[int]
    lengths: list[int]
    max_context: int
    max_block: int
    block_size: int
    plain: bool

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def decode_only(self) -> bool:
        """Whether every segment is a single token."""
        return self.num_tokens == len(self.lengths)

    def fill_in(self, sampled: torch.Tensor) -> None:
        """Put tokens of the step before, [rows], where they are awaited."""
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
        frame: GraphBuffers | None = None,
    ) -> PackedBatch:
        """Pack segments in the order given. frame: where the tensors are; seats without a segment are at the end.

        Raises `ValueError` for an empty one, too short a block table, an offset beyond the first block, or what the
        frame does not hold.
        """
        n = len(segments)
        lengths, starts = [s.length for s in segments], [s.start for s in segments]
        if n == 0 or min(lengths) == 0:
            raise ValueError("a batch needs at least one segment, and a segment at least one token")
        lens, first = np.array((lengths, starts), np.int64)
        held = np.fromiter((len(s.blocks) for s in segments), np.int64, n)
        if first.min() < 0:
            raise ValueError(f"segment {first.argmin()} starts at {first.min()}")
        context = first + lens
        plain = not any(s.offset or s.reverse for s in segments)
        skipped = np.zeros(n, np.int64) if plain else _offsets(segments, block_size)
        _check_tables(context + skipped, held, block_size)
        tokens = int(lens.sum())
        rows, row_starts = _wanted_rows(segments, lengths, tokens)
        empty, width = 0, int(held.max())
        if frame is not None:
            if n > frame.seats or tokens > n or rows is not None or width > frame.width:
                raise ValueError(f"the frame holds {frame.seats} decodes with tables of {frame.width} blocks")
            empty = frame.seats - n
        # One buffer, so that a device needs one copy.
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
        if not plain:
            to.offsets[:n], to.reversed[:n] = skipped, [s.reverse for s in segments]
        to.slots[:tokens], to.slots[tokens:] = _slots(to, tables, owner, block_size, plain=plain), -1
        pending_samples = _fill_sources(to, segments)
        to.wanted[:] = rows or ()
        buffer = to_device(torch.from_numpy(flat), torch.device(device))
        parts = _Parts(*(buffer[a:b] for a, b in pairwise(bounds)))
        block_tables = parts.tables.view(n + empty, width)
        if frame is not None:
            parts, block_tables = frame.place(buffer, block_tables)
        return cls(
            parts.token_ids,
            parts.positions,
            parts.slots,
            parts.sources if pending_samples or frame is not None else None,
            parts.query_start,
            parts.context_lens,
            parts.offsets,
            parts.reversed,
            block_tables,
            None if rows is None else parts.wanted,
            row_starts=[*row_starts, *range(n + 1, n + empty + 1)],
            starts=starts + [0] * empty,
            lengths=lengths + [1] * empty,
            max_context=int(context.max()),
            max_block=int(tables.max()),
            block_size=block_size,
            plain=plain,
        )


class _Parts(NamedTuple):
    """The parts of a batch's buffer, in their order."""

    token_ids: Any
    positions: Any
    slots: Any
    sources: Any
    query_start: Any
    context_lens: Any
    offsets: Any
    reversed: Any
    tables: Any
    wanted: Any


def _bounds(tokens: int, segments: int, width: int, rows: int) -> list[int]:
    """Where the parts of a batch's buffer begin and end."""
    sizes = _Parts(
        tokens, tokens, tokens, tokens, segments + 1, segments, segments, segments, segments * width, rows
    )  # fmt: skip
    bounds: list[int] = np.cumsum((0, *sizes)).tolist()
    return bounds


def _fill_tables(tables: np.ndarray, segments: Sequence[Segment], held: np.ndarray) -> None:
    """Write the segments' blocks, of which they hold so many. Raises `ValueError` for one that does not exist."""
    in_table = chain.from_iterable(s.blocks for s in segments)
    tables[np.arange(tables.shape[1]) < held[:, None]] = np.fromiter(in_table, np.int64, int(held.sum()))
    if tables.min() < 0:
        raise ValueError(f"block {tables.min()} does not exist")


def _slots(to: _Parts, tables: np.ndarray, owner: np.ndarray, block_size: int, *, plain: bool) -> np.ndarray:
    """Where the tokens go. owner: the segment of each."""
    positions = to.positions[: len(owner)]
    if plain:
        block, slot = np.divmod(positions, block_size)
    else:
        block, slot = np.divmod(positions + to.offsets[owner], block_size)
        slot = np.where(to.reversed[owner], block_size - 1 - slot, slot)
    slots: np.ndarray = tables[owner, block] * block_size + slot
    return slots


def _fill_sources(to: _Parts, segments: Sequence[Segment]) -> bool:
    """Say where tokens come from; whether any is awaited."""
    awaits = [(i, s.awaits) for i, s in enumerate(segments) if s.awaits is not None]
    to.sources[:] = -1
    for i, row in awaits:
        to.sources[to.query_start[i + 1] - 1] = row
    return bool(awaits)


def _token_ids(segment: Segment) -> Sequence[int]:
    """Its tokens, 0 for one that is awaited."""
    return segment.tokens if segment.awaits is None else (*segment.tokens, 0)


def _offsets(segments: Sequence[Segment], block_size: int) -> np.ndarray:
    """Where the segments begin in their first blocks. Raises `ValueError` for one that begins outside."""
    offsets = np.fromiter((s.offset for s in segments), np.int64, len(segments))
    outside = np.flatnonzero((offsets < 0) | (offsets >= block_size))
    if len(outside):
        i = outside[0]
        raise ValueError(f"segment {i} has offset {offsets[i]}, it must be in [0, {block_size - 1}]")
    return offsets


def _check_tables(needed: np.ndarray, held: np.ndarray, block_size: int) -> None:
    """Raise `ValueError` where a segment's table does not cover the slots that it needs."""
    short = np.flatnonzero(held * block_size < needed)
    if len(short):
        i = short[0]
        raise ValueError(f"segment {i} needs {needed[i]} slots, its blocks have {held[i] * block_size}")


def _wanted_rows(segments: Sequence[Segment], lengths: list[int], total: int) -> tuple[list[int] | None, list[int]]:
    """Tokens whose logits are wanted (None: all), and the first row of each segment with the end appended."""
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
