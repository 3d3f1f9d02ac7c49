"""One step's work as flat tensors: the tokens of all sequences end to end, and where their KV lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch


class Segment(NamedTuple):
    """Consecutive new tokens of one sequence.

    tokens: their ids. start: position of the first, which is also how many tokens already have KV.
    blocks: the sequence's block table, covering at least start + len(tokens) slots.
    sample: the logits of the last token are wanted. all_logits: those of every token are. awaits: one more token
    follows, which is not known here: the one in this row of what the step before sampled.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool = True
    all_logits: bool = False
    awaits: int | None = None

    @property
    def length(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens) + (self.awaits is not None)


class Frame:
    """A place on a device for batches of up to `seats` segments of one token each, whose tables have up to `width`
    blocks: every batch that is built in it has the same tensors, with other contents.

    Seats that stay empty have context 0 and slot -1, which is nowhere.
    """

    def __init__(self, seats: int, width: int, device: torch.device) -> None:
        self.seats, self.width = seats, width
        self.buffer = torch.empty(_bounds(seats, seats, width, 0)[-1], dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Segments packed end to end; n segments, T tokens. Index tensors are int64 on the batch's device.

    token_ids, positions, slots: [T]; a slot is block * block_size + offset. sources: [T], the row of the step before
    from which a token comes, -1 where it is known; None: all are.
    query_start: [n + 1], first token of each segment. context_lens: [n], tokens with KV after this step.
    block_tables: [n, widest], padded with 0. logit_rows: [rows], tokens whose logits are wanted, in order;
    None: all T. row_starts: rows of segment i are row_starts[i]:row_starts[i + 1].
    starts, lengths: per segment, as host lists. max_context: the longest context. max_block: the largest block.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor | None
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor | None
    row_starts: list[int]
    starts: list[int]
    lengths: list[int]
    max_context: int
    max_block: int
    block_size: int

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
        frame: Frame | None = None,
    ) -> PackedBatch:
        """Pack segments in the order given. frame: where the tensors are; seats without a segment are at the end.

        Raises `ValueError` for an empty one, too short a block table, or more than the frame holds."""
        n = len(segments)
        lengths = [s.length for s in segments]
        starts = [s.start for s in segments]
        if n == 0 or min(lengths) == 0:
            raise ValueError("a batch needs at least one segment, and a segment at least one token")
        lens, first = np.array((lengths, starts), np.int64)
        held = np.fromiter((len(s.blocks) for s in segments), np.int64, n)
        context = first + lens
        if first.min() < 0:
            raise ValueError(f"segment {first.argmin()} starts at {first.min()}")
        _check_tables(context, held, block_size)
        rows, row_starts = _wanted_rows(segments, lengths, int(lens.sum()))
        empty, width = 0, int(held.max())
        if frame is not None:
            if n > frame.seats or width > frame.width or max(lengths) > 1 or rows is not None:
                raise ValueError(f"the frame holds {frame.seats} decodes with tables of {frame.width} blocks")
            empty, width = frame.seats - n, frame.width
        total, seats = int(lens.sum()) + empty, n + empty
        # One buffer, so that a device needs one copy.
        bounds = _bounds(total, seats, width, 0 if rows is None else len(rows))
        flat = np.zeros(bounds[-1], np.int64)
        ids, positions, slots, sources, query_start, context_lens, tables, wanted = (
            flat[a:b] for a, b in pairwise(bounds)
        )
        end = total - empty
        ids[:end] = np.fromiter(chain.from_iterable(_token_ids(segments)), np.int64, end)
        query_start[1:] = np.cumsum(np.concatenate((lens, np.ones(empty, np.int64))))
        context_lens[:n] = context
        tables = tables.reshape(seats, width)
        in_table = chain.from_iterable(s.blocks for s in segments)
        tables[:n][np.arange(width) < held[:, None]] = np.fromiter(in_table, np.int64, int(held.sum()))
        if tables.min() < 0:
            raise ValueError(f"block {tables.min()} does not exist")
        owner = np.repeat(np.arange(n), lens)
        positions[:end] = np.arange(end) + (first - query_start[:n])[owner]
        block, offset = np.divmod(positions[:end], block_size)
        slots[:end] = tables[owner, block] * block_size + offset
        slots[end:] = -1
        sources[:] = -1
        awaits = [(i, s.awaits) for i, s in enumerate(segments) if s.awaits is not None]
        for i, row in awaits:
            sources[query_start[i + 1] - 1] = row
        if rows is not None:
            wanted[:] = rows
        buffer = _placed(flat, device, frame)
        parts = [buffer[a:b] for a, b in pairwise(bounds)]
        return cls(
            *parts[:3],
            sources=parts[3] if awaits or frame is not None else None,
            query_start=parts[4],
            context_lens=parts[5],
            block_tables=parts[6].view(seats, width),
            logit_rows=None if rows is None else parts[7],
            row_starts=row_starts + list(range(n + 1, seats + 1)),
            starts=starts + [0] * empty,
            lengths=lengths + [1] * empty,
            max_context=int(context.max()),
            max_block=int(tables.max()),
            block_size=block_size,
        )


def _bounds(tokens: int, segments: int, width: int, rows: int) -> list[int]:
    """Where the parts of a batch's buffer begin and end."""
    sizes = (tokens, tokens, tokens, tokens, segments + 1, segments, segments * width, rows)
    bounds: list[int] = np.cumsum((0, *sizes)).tolist()
    return bounds


def _placed(flat: np.ndarray, device: torch.device | str, frame: Frame | None) -> torch.Tensor:
    """The buffer on its device, or in its frame."""
    buffer = torch.from_numpy(flat)
    if torch.device(device).type == "cuda":
        buffer = buffer.pin_memory()
        if frame is None:
            return buffer.to(device, non_blocking=True)
    return buffer if frame is None else frame.buffer.copy_(buffer, non_blocking=True)


def _token_ids(segments: Sequence[Segment]) -> Iterator[Sequence[int]]:
    """The tokens of each segment, 0 where one is awaited."""
    for segment in segments:
        yield segment.tokens if segment.awaits is None else (*segment.tokens, 0)


def _check_tables(context: np.ndarray, held: np.ndarray, block_size: int) -> None:
    """Raise `ValueError` where a segment's table does not cover its tokens."""
    short = np.flatnonzero(held * block_size < context)
    if len(short):
        i = short[0]
        raise ValueError(f"segment {i} needs {context[i]} slots, its blocks have {held[i] * block_size}")


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
