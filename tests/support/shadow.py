"""What lies in the slots of KV blocks, kept beside an engine core: every slice must find the KV that it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import ref

from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, StepPlan

ORDER = (Direction.OUT, Direction.WITHIN, Direction.IN)
Slot = tuple[int, int]  # a block, and a slot of it


class Content(NamedTuple):
    """The KV of the request's token at this position."""

    request: ref[Request]
    position: int


class Shadow:
    """Follows plans in the order in which they are run."""

    def __init__(self, kv: KVLedger) -> None:
        self._kv = kv
        self._device: dict[Slot, Content] = {}
        self._host: dict[Slot, Content] = {}

    def run(self, plan: StepPlan) -> None:
        """Copy and compute as the plan says. Everything that a slice reads must lie where its table says, and nothing
        that another one reads or writes is written."""
        for move in sorted(plan.blocking, key=lambda move: ORDER.index(move.direction)):
            self._copy(move)
        for move in plan.overlapped:
            self._copy(move)
        read: set[Slot] = set()
        written: list[Slot] = []
        find = self._device.get
        for piece in plan.slices:
            request, start = piece.request, piece.start
            slots = self._slots(request, piece.blocks, 0, start + piece.tokens)
            for position, slot in enumerate(slots[:start]):
                found = find(slot)
                if found is None or found[1] != position or found[0]() is not request:
                    self._assert_may_read(slot, request, position)
            read.update(slots[:start])
            written += slots[start:]
        assert len(set(written)) == len(written), "two slices write to one slot"
        assert read.isdisjoint(written), "a slice writes to a slot that another one reads"
        for piece in plan.slices:
            self.fill(piece.request, piece.blocks, piece.start, piece.start + piece.tokens)

    def fill(self, request: Request, blocks: Sequence[int], start: int, end: int) -> None:
        """The request's tokens from `start` to `end` are computed."""
        owner = ref(request)
        for position, slot in enumerate(self._slots(request, blocks, start, end), start):
            self._device[slot] = Content(owner, position)

    def lose(self, moves: Iterable[Move]) -> None:
        """The moves failed."""
        for move in moves:
            there = self._host if move.direction is Direction.OUT else self._device
            for _, slot in self._pairs(move):
                # A host block may have been handed out again meanwhile.
                if (found := there.get(slot)) is not None and found.request() in (move.request, None):
                    del there[slot]

    def clear(self) -> None:
        """Everything is lost."""
        self._device.clear()
        self._host.clear()

    def _slots(self, request: Request, blocks: Sequence[int], start: int, end: int) -> list[Slot]:
        """Where the positions from `start` to `end` lie."""
        size = self._kv.block_size
        first = start // size
        order = range(size - 1, -1, -1) if request.reverse else range(size)
        slots = [(block, slot) for block in blocks[first : -(-end // size)] for slot in order]
        assert len(slots) >= end - first * size, f"request {request.id} has too few blocks"
        return slots[start - first * size : end - first * size]

    def _pairs(self, move: Move) -> Iterator[tuple[Slot, Slot]]:
        """Slots that the move reads, and those that it writes."""
        spans = move.spans or ((0, self._kv.block_size),) * len(move.source)
        for source, target, (first, count) in zip(move.source, move.target, spans, strict=True):
            for slot in range(first, first + count):
                yield (source, slot), (target, slot)

    def _copy(self, move: Move) -> None:
        here = self._host if move.direction is Direction.IN else self._device
        there = self._host if move.direction is Direction.OUT else self._device
        for source, target in self._pairs(move):
            if (found := here.get(source)) is not None:
                there[target] = found
            else:
                there.pop(target, None)

    def _assert_may_read(self, slot: Slot, request: Request, position: int) -> None:
        found = self._device.get(slot)
        assert found is not None, f"slot {slot} of request {request.id} holds nothing"
        assert found.position == position, f"request {request.id} reads the KV of another token"
        other = found.request()
        if other is not request:
            assert request.prefix is not None, f"request {request.id} reads the KV of another request"
            if other is not None:
                assert other.reverse == request.reverse
                assert other.tokens(0, position + 1) == request.tokens(0, position + 1), f"{request} reads another's KV"
