"""What lies in KV blocks, kept beside an engine core: every slice must find the KV that it reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from weakref import ref

from skipjoin.core.kv import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, StepPlan


class Content(NamedTuple):
    """The first `filled` tokens of the request's block `index`."""

    request: ref[Request]
    index: int
    filled: int


class Shadow:
    """Follows plans in the order in which they are run."""

    def __init__(self, kv: KVLedger) -> None:
        self._kv = kv
        self._device: dict[int, Content] = {}
        self._host: dict[int, Content] = {}

    def run(self, plan: StepPlan) -> None:
        """Copy and compute as the plan says. Everything that a slice reads must lie where its table says, and nothing
        that another one reads is written."""
        for move in sorted(plan.blocking, key=lambda move: move.direction is Direction.IN):
            self._copy(move)
        for move in plan.overlapped:
            self._copy(move)
        size = self._kv.block_size
        written: list[int] = []
        for piece in plan.slices:
            for index, block in enumerate(piece.blocks[: -(-piece.start // size)]):
                self._assert_is(block, piece.request, index, min(size, piece.start - index * size))
            written += piece.blocks[piece.start // size :]
        read = [block for piece in plan.slices for block in piece.blocks[: piece.start // size]]
        assert len(set(written)) == len(written), "two slices write to one block"
        assert not set(written).intersection(read), "a slice writes to a block that another one reads"
        for piece in plan.slices:
            self.fill(piece.request, piece.blocks, piece.start, piece.start + piece.tokens)

    def fill(self, request: Request, blocks: Iterable[int], start: int, end: int) -> None:
        """The request's tokens from `start` to `end` are computed."""
        size = self._kv.block_size
        for index, block in enumerate(blocks):
            if start < (index + 1) * size and index * size < end:
                self._device[block] = Content(ref(request), index, min(size, end - index * size))

    def lose(self, moves: Iterable[Move]) -> None:
        """The moves failed."""
        for move in moves:
            for block in move.target:
                (self._host if move.direction is Direction.OUT else self._device).pop(block, None)

    def clear(self) -> None:
        """Everything is lost."""
        self._device.clear()
        self._host.clear()

    def _copy(self, move: Move) -> None:
        here, there = self._device, self._host
        if move.direction is Direction.IN:
            here, there = there, here
        for source, target in zip(move.source, move.target, strict=True):
            there[target] = here[source]

    def _assert_is(self, block: int, request: Request, index: int, tokens: int) -> None:
        found = self._device.get(block)
        assert found is not None, f"block {block} of request {request.id} holds nothing"
        assert found.index == index, f"request {request.id} reads the KV of another block"
        assert found.filled >= tokens, f"request {request.id} reads KV that is not there"
        other = found.request()
        if other is not request:
            size = self._kv.block_size
            assert found.filled == size, "a block is shared that is not full"
            end = (index + 1) * size
            assert other is None or other.tokens(0, end) == request.tokens(0, end), f"{request} reads another's KV"
