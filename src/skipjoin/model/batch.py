"""One step's work as flat tensors: the tokens of all sequences end to end, and where their KV lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch


class Segment(NamedTuple):
    """Consecutive new tokens of one sequence.

    tokens: their ids. start: position of the first, which is also how many tokens already have KV.
    blocks: the sequence's block table, covering at least offset + start + len(tokens) slots.
    sample: the logits of the last token are wanted. all_logits: those of every token are.
    offset: slots left out at the end of the first block where the sequence begins, in [0, block_size).
    reverse: blocks are filled from their last slot down, so that two sequences can share one from both ends.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: bool = True
    all_logits: bool = False
    offset: int = 0
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Segments packed end to end; n segments, T tokens. Index tensors are int64 on the batch's device.

    token_ids, positions, slots: [T]; a slot is block * block_size + its place in the block; -1: the token is padding,
    and its keys and values go nowhere.
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

    @classmethod
    def build(cls, segments: Sequence[Segment], block_size: int, device: torch.device | str = "cpu") -> PackedBatch:
        """Pack segments in the order given.

        Raises `ValueError` for an empty one, too short a block table, or an offset beyond the first block.
        """
        n = len(segments)
        lengths = [len(s.tokens) for s in segments]
        starts = [s.start for s in segments]
        if n == 0 or min(lengths) == 0:
            raise ValueError("a batch needs at least one segment, and a segment at least one token")
        directions = [s.reverse for s in segments]
        lens, first, skipped, backward = np.array((lengths, starts, [s.offset for s in segments], directions), np.int64)
        held = np.fromiter((len(s.blocks) for s in segments), np.int64, n)
        context = first + lens
        if first.min() < 0:
            raise ValueError(f"segment {first.argmin()} starts at {first.min()}")
        _check_tables(context, skipped, held, block_size)
        total, width = int(lens.sum()), int(held.max())
        rows, row_starts = _wanted_rows(segments, lengths, total)
        # One buffer, so that a device needs one copy.
        sizes = (total, total, total, n + 1, n, n, n, n * width, 0 if rows is None else len(rows))
        bounds = np.cumsum((0, *sizes)).tolist()
        flat = np.zeros(bounds[-1], np.int64)
        views = [flat[a:b] for a, b in pairwise(bounds)]
        ids, positions, slots, query_start, context_lens, offsets, reverse, tables, wanted = views
        ids[:] = np.fromiter(chain.from_iterable(s.tokens for s in segments), np.int64, total)
        query_start[1:] = np.cumsum(lens)
        context_lens[:], offsets[:], reverse[:] = context, skipped, backward
        tables = tables.reshape(n, width)
        in_table = chain.from_iterable(s.blocks for s in segments)
        tables[np.arange(width) < held[:, None]] = np.fromiter(in_table, np.int64, int(held.sum()))
        if tables.min() < 0:
            raise ValueError(f"block {tables.min()} does not exist")
        owner = np.repeat(np.arange(n), lens)
        positions[:] = np.arange(total) + (first - query_start[:-1])[owner]
        block, slot = np.divmod(positions + skipped[owner], block_size)
        slots[:] = tables[owner, block] * block_size + np.where(backward[owner], block_size - 1 - slot, slot)
        if rows is not None:
            wanted[:] = rows
        buffer = torch.from_numpy(flat)
        if torch.device(device).type == "cuda":
            buffer = buffer.pin_memory().to(device, non_blocking=True)
        parts = [buffer[a:b] for a, b in pairwise(bounds)]
        return cls(
            *parts[:7],
            block_tables=parts[7].view(n, width),
            logit_rows=None if rows is None else parts[8],
            row_starts=row_starts,
            starts=starts,
            lengths=lengths,
            max_context=int(context.max()),
            max_block=int(tables.max()),
            block_size=block_size,
            plain=not (skipped.any() or backward.any()),
        )


def _check_tables(context: np.ndarray, skipped: np.ndarray, held: np.ndarray, block_size: int) -> None:
    """Raise `ValueError` where a segment begins outside its first block, or its table does not cover its tokens."""
    outside = np.flatnonzero((skipped < 0) | (skipped >= block_size))
    if len(outside):
        i = outside[0]
        raise ValueError(f"segment {i} has offset {skipped[i]}, it must be in [0, {block_size - 1}]")
    short = np.flatnonzero(held * block_size < context + skipped)
    if len(short):
        i = short[0]
        raise ValueError(f"segment {i} needs {context[i] + skipped[i]} slots, its blocks have {held[i] * block_size}")


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
