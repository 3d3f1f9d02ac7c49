"""Bidirectional block sharing between a real-time and a best-effort request (BROS section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from skipjoin.core.kv.prefix_cache import PrefixCache
from skipjoin.core.kv.reservation_tree import LedgerError, RequestBlocks, SharedBlock
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Span


class Copies(NamedTuple):
    """Builder of a move that copies spans of blocks."""

    source: list[int]
    target: list[int]
    spans: list[Span]

    @classmethod
    def none(cls) -> Copies:
        return cls([], [], [])

    def add(self, source: int, target: int, span: Span) -> None:
        if span.slots:
            self.source.append(source)
            self.target.append(target)
            self.spans.append(span)

    def move(self, direction: Direction, request: Request) -> Move:
        tokens = sum(span.slots for span in self.spans)
        return Move(direction, request, tuple(self.source), tuple(self.target), tokens, tuple(self.spans))


class TwoEnds(PrefixCache):
    """Prefix cache with bidirectional blocks.

    A request that fills its blocks from the last slot down (`Request.reverse`) lends blocks to one that fills upward,
    while no plan contains the owner. The borrower takes the empty slots first. Before it overwrites a slot of the
    owner, the slot is saved to a CPU-tier block (a lazy checkpoint). The owner runs again once all of its KV is on the
    device: in place if the borrower has left, otherwise in a block of its own.

    A lent block counts in its owner's reservation while the owner holds it. A block has at most one borrower and no
    key, so no third request holds it.
    """

    def __init__(self, device_blocks: int, host_blocks: int, block_size: int, *, is_exact: bool) -> None:
        super().__init__(device_blocks, host_blocks, block_size, is_exact=is_exact)
        self._ends: dict[int, SharedBlock] = {}
        self._idle_parts: set[Move] = set()
        self.blocks_in_transit = dict.fromkeys(Direction, 0)

    # -- queries ------------------------------------------------------------------------------------------

    @property
    def has_two_ends(self) -> bool:
        return self.host_total > 0 and self._is_exact

    @property
    def lent_blocks(self) -> int:
        return sum(end.borrower is not None for end in self._ends.values())

    def copies(self) -> Iterator[int]:
        """Iterate over the CPU-tier blocks reserved for slots of lent blocks."""
        return (end.copy for end in self._ends.values() if end.copy is not None)

    def empty_slots(self, request: Request) -> int:
        return -request.computed % self.block_size

    def in_the_way(self, request: Request, tokens: int) -> Iterator[Request]:
        held = self._held.get(request)
        for end in held.borrows.values() if held is not None else ():
            if tokens - end.at * self.block_size > end.split and self._reach(end, tokens) > self._limit(end):
                yield end.owner.request

    def extra(self, request: Request, tokens: int) -> int:
        """Return how many device blocks the request needs beyond those for `tokens` tokens.

        They replace blocks in which a borrower has taken slots.
        """
        held = self._held.get(request)
        return sum(self._is_contested(end, tokens) for end in held.lends.values()) if held is not None else 0

    def relief(self, request: Request, tokens: int, others: Iterable[Request]) -> int:
        held = self._held.get(request)
        if held is None or not held.lends:
            return 0
        contested = [end.borrower for end in held.lends.values() if self._is_contested(end, tokens)]
        some = {self._held.get(other) for other in others}
        return sum(borrower in some for borrower in contested)

    # -- sharing ------------------------------------------------------------------------------------------

    def can_lend(self, owner: Request, borrower: Request) -> bool:
        lends, borrows = self._held.get(owner), self._held.get(borrower)
        if lends is None or not owner.reverse or borrower.reverse or owner.in_flight:
            return False
        return lends.moving is None and (borrows is None or not (borrows.moving or borrows.away))

    def lend(self, owner: Request, keep: int, borrower: Request) -> bool:
        """Lend blocks, the last ones first because they have the most empty slots. Each needs one CPU-tier block."""
        lends = self._held[owner]
        some: list[int] = []
        for index in range(len(lends.device) - 1, keep - 1, -1):
            block = lends.device[index]
            end = self._ends.get(block)
            if end is None and len(self._holders.get(block, ())) > 1:
                return False
            if end is None or end.borrower is None:
                some.append(index)
        if sum(index not in lends.lends for index in some) > self._host.free:
            return False
        borrows = self._holding(borrower)
        for index in some:
            self._lend(lends, index, borrows)
        self._refresh(owner, lends)
        self._refresh(borrower, borrows)
        return True

    def _lend(self, owner: RequestBlocks, index: int, borrower: RequestBlocks) -> None:
        block = owner.device[index]
        end = self._ends.get(block)
        if end is None:
            if self._holders.pop(block, None) is not None:
                self._device.unname(block)
            owner.keyed = min(owner.keyed, index)
            (copy,) = self._host.take(1)
            end = self._ends[block] = owner.lends[index] = SharedBlock(block, owner, index, copy)
        end.borrower, end.at, end.split = borrower, len(borrower.device), self._limit(end)
        borrower.device.append(block)
        borrower.borrows[end.at] = end
        borrower.adopted += 1
        owner.shared += 1
        self._holders[block] = [owner, borrower]

    def take_slots(self, request: Request, tokens: int) -> list[Move]:
        held, moves = self._held[request], []
        for end in held.borrows.values():
            need = self._reach(end, tokens)
            if need <= end.split:
                continue
            if (count := need - self._limit(end)) > 0:
                moves.append(self._save(end, count))
                end.split = need
            else:  # divide the remaining slots equally
                end.split = (need + self._limit(end) + 1) // 2
            self._refresh_owner(end)
        held.room = self._room(request, held)
        return moves

    def _save(self, end: SharedBlock, count: int) -> Move:
        owner = end.owner
        assert end.copy is not None
        copies = Copies.none()
        copies.add(end.block, end.copy, Span(self._limit(end), count))
        move = copies.move(Direction.OUT, owner.request)
        owner.overwritten += not end.saved
        end.saved += count
        owner.parts[move] = end.index
        self.blocks_in_transit[Direction.OUT] += 1
        return move

    # -- restoring the owner's KV -------------------------------------------------------------------------

    def take_back(self, request: Request, tokens: int, more: Sequence[tuple[int, int, Span]] = ()) -> list[Move]:
        """Give the owner slots for `tokens` tokens. Check `extra` first.

        Slots that a borrower has taken are replaced in other blocks.

        Args:
            more: Copies of all that the request has on the CPU tier, as (source, target, span).
        """
        held = self._held[request]
        if not (held.lends or more):
            return []
        within, back = self._settle(held, tokens)
        self._refresh(request, held)
        moves = [self._set_aside(held, within.move(Direction.WITHIN, request))] if within.source else []
        if back.source:
            held.host[:0] = back.source
            for copy in more:
                back.add(*copy)
            moves.append(self._begin(held, back.move(Direction.IN, request)))
        return moves

    def _settle(self, held: RequestBlocks, tokens: int) -> tuple[Copies, Copies]:
        """Give the request slots for `tokens` tokens.

        Returns:
            Copies from other device blocks and copies from the CPU tier. The caller takes over the CPU-tier blocks.
        """
        within, back = Copies.none(), Copies.none()
        for index, end in sorted(held.lends.items()):
            filled, size = self._filled_slots(held, index), self.block_size
            if self._is_contested(end, tokens):
                (held.device[index],) = self._device.take(1)
                rest = filled - end.saved
                within.add(end.block, held.device[index], Span(size - rest, rest))
            elif end.borrower is not None:
                if (need := self._need(end, tokens)) > size - end.split:
                    end.split = (self._taken(end) + size - need) // 2
                    self._refresh_borrower(end)
                continue
            if end.saved:
                assert end.copy is not None
                back.add(end.copy, held.device[index], Span(size - filled, end.saved))
                end.copy = None
            self._part_ways(end, held)
        return within, back

    def _part_ways(self, end: SharedBlock, held: RequestBlocks) -> None:
        """Stop sharing the block; a borrower keeps it alone."""
        if end.borrower is not None:
            self._part(held, end.block)
        else:
            self._leave(end, held)

    # -- moves in transit ---------------------------------------------------------------------------------

    def _begin(self, held: RequestBlocks, move: Move) -> Move:
        held.moving, held.move = move.direction, move
        self.blocks_in_transit[move.direction] += len(move.source)
        return move

    def _set_aside(self, held: RequestBlocks, move: Move) -> Move:
        held.moving, held.aside = held.moving or move.direction, move
        self.blocks_in_transit[move.direction] += len(move.source)
        return move

    def _end(self, move: Move) -> tuple[RequestBlocks | None, int | None]:
        """Unregister a move in transit.

        Returns:
            The record of its request, and the index of the block if the move saved slots. (None, None) if no request
                depends on the move.
        """
        if move.request is None or move in self._idle_parts:
            self._idle_parts.discard(move)
            self.blocks_in_transit[move.direction] -= len(move.source)
            return None, None
        held, index = self._held[move.request], None
        if move in held.parts:
            index = held.parts.pop(move)
        elif held.aside is move:
            held.aside = None
        elif held.move is move:
            held.move = None
        else:
            raise LedgerError(f"request {move.request.id}: a move ended that was not in transit")
        if index is None:
            left = held.move or held.aside
            held.moving = left.direction if left is not None else None
        self.blocks_in_transit[move.direction] -= len(move.source)
        return held, index

    def _forget_parts(self, held: RequestBlocks, keep: int = 0) -> None:
        """Detach moves that save slots of blocks after the first `keep`, whose KV is dropped.

        Their CPU-tier blocks can be reused at once, because later writes are ordered after these moves.
        """
        for move in [move for move, index in held.parts.items() if index >= keep]:
            del held.parts[move]
            self._idle_parts.add(move)

    # -- slots --------------------------------------------------------------------------------------------

    def _filled_slots(self, held: RequestBlocks, index: int) -> int:
        """Return how many of the block's slots have KV of the request: in place, saved, or planned."""
        return min(self.block_size, max(0, held.request.planned - index * self.block_size))

    def _limit(self, end: SharedBlock) -> int:
        """Return the first slot of the owner that is not saved."""
        return self.block_size - self._filled_slots(end.owner, end.index) + end.saved

    def _reach(self, end: SharedBlock, tokens: int) -> int:
        """Return the number of slots that the borrower fills with `tokens` tokens."""
        return min(self.block_size, tokens - end.at * self.block_size)

    def _taken(self, end: SharedBlock) -> int:
        """Return the number of slots that the borrower has filled, including plans in flight."""
        borrower = end.borrower
        return max(0, self._reach(end, borrower.request.planned)) if borrower is not None else 0

    def _need(self, end: SharedBlock, tokens: int) -> int:
        """Return the number of slots that the owner fills with `tokens` tokens."""
        return min(self.block_size, tokens - end.index * self.block_size)

    def _is_contested(self, end: SharedBlock, tokens: int) -> bool:
        """Return whether the owner needs another block in place of this one to have `tokens` tokens."""
        if end.borrower is None:
            return False
        return end.saved > 0 or self._need(end, tokens) > self.block_size - self._taken(end)

    def _is_whole(self, block: int) -> bool:
        return block not in self._ends

    def _room(self, request: Request, held: RequestBlocks) -> int:
        room = super()._room(request, held)
        if held.overwritten:
            return 0
        if held.lends and (end := held.lends.get(len(held.device) - 1)) is not None and end.borrower is not None:
            room = min(room, (end.index + 1) * self.block_size - end.split)
        for at, end in held.borrows.items():
            if end.split < self.block_size:
                return min(room, at * self.block_size + end.split)
        return room

    # -- end of sharing -----------------------------------------------------------------------------------

    def _part(self, held: RequestBlocks, block: int) -> bool:
        stays = super()._part(held, block)
        if (end := self._ends.get(block)) is not None:
            self._holders.pop(block, None)
            self._leave(end, held)
        return stays

    def _leave(self, end: SharedBlock, held: RequestBlocks) -> None:
        """Remove one of the two requests from the block."""
        if end.borrower is not None:
            del end.borrower.borrows[end.at]
        if held is end.borrower:
            end.borrower = None
            if not end.saved:
                self._forget_end(end)
            self._refresh_owner(end)
            return
        self._forget_end(end)
        if end.borrower is not None:
            self._refresh_borrower(end)

    def _forget_end(self, end: SharedBlock) -> None:
        del self._ends[end.block]
        del end.owner.lends[end.index]
        end.owner.overwritten -= end.saved > 0
        if end.copy is not None:
            self._host.put([end.copy])

    def _refresh_owner(self, end: SharedBlock) -> None:
        end.owner.room = self._room(end.owner.request, end.owner)

    def _refresh_borrower(self, end: SharedBlock) -> None:
        assert end.borrower is not None
        end.borrower.room = self._room(end.borrower.request, end.borrower)

    def _give_back(self, held: RequestBlocks, blocks: Sequence[int]) -> None:
        if not self._ends:
            super()._give_back(held, blocks)
            return
        self._device.put([block for block in blocks if not self._part(held, block)])

    def _forget_blocks(self) -> None:
        super()._forget_blocks()
        self._ends.clear()
        self._idle_parts.clear()
        self.blocks_in_transit = dict.fromkeys(Direction, 0)

    # -- consistency check --------------------------------------------------------------------------------

    def _check_ends(self) -> None:
        """Raise `LedgerError` unless each shared block has one owner and at most one borrower, with disjoint slots."""
        if not (self._ends or any(held.lends or held.borrows or held.overwritten for held in self._held.values())):
            return
        known = {id(end) for held in self._held.values() for end in (*held.lends.values(), *held.borrows.values())}
        if known != {id(end) for end in self._ends.values()}:
            raise LedgerError("a request knows of other shared blocks than there are")
        for block, end in self._ends.items():
            if problem := self._problem_of(block, end):
                raise LedgerError(f"block {block}, which two requests share, {problem}")
        for request, held in self._held.items():
            if held.overwritten != sum(end.saved > 0 for end in held.lends.values()):
                raise LedgerError(f"request {request.id} counts other blocks as overwritten than are")

    def _problem_of(self, block: int, end: SharedBlock) -> str:
        owner, borrower = end.owner, end.borrower
        filled = self._filled_slots(owner, end.index)
        if not owner.request.reverse or owner.lends.get(end.index) is not end or owner.device[end.index] != block:
            return "is not its owner's"
        if end.copy is None or not filled or end.saved > filled:
            return "has slots saved that are not filled"
        if borrower is None:
            return "" if end.saved else "is used by its owner alone"
        if borrower.request.reverse or borrower.borrows.get(end.at) is not end or borrower.device[end.at] != block:
            return "is not its borrower's"
        taken = max(0, self._reach(end, borrower.request.computed))
        if taken > end.split or end.split > self._limit(end):
            return "has slots that both may fill"
        return ""
