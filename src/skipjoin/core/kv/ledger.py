"""KV block accounting on both tiers; the planner and the policies see it as `Ledger` (`core.kv.interface`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from skipjoin.core.kv.reservation_tree import LedgerError, RequestBlocks
from skipjoin.core.kv.reservations import Lender
from skipjoin.core.kv.shared_blocks import Copies, TwoEnds
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.step import Direction, Move, Span


class KVLedger(TwoEnds):
    """Ledger of the KV blocks that each request holds and reserves, and of the moves in transit.

    The first blocks of a request are on the device and the rest on the CPU tier; usually all are on one tier. While one
    of its moves is in transit, a request cannot be moved again or released. Blocks that the move still reads are
    *fenced*: neither free nor usable until `land`. Blocks are allocated in a fixed order, so that traces are
    reproducible.

    Attributes:
        device_blocks: Size of the device pool.
        host_blocks: Size of the CPU-tier pool.
        block_size: Tokens per block.
        is_exact: Whether swapping preserves KV exactly. Otherwise swapped KV is excluded from the prefix cache.
        blocks_of: Returns what a request holds, or None. Only the ledger may change it.
    """

    def __init__(self, device_blocks: int, host_blocks: int, block_size: int, *, is_exact: bool = True) -> None:
        for name, value, low in (
            ("device_blocks", device_blocks, 1),
            ("host_blocks", host_blocks, 0),
            ("block_size", block_size, 1),
        ):
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        super().__init__(device_blocks, host_blocks, block_size, is_exact=is_exact)
        # Called for every request in every step, so bind the dictionary's method directly.
        self.blocks_of: Callable[[Request], RequestBlocks | None] = self._held.get

    # -- queries ------------------------------------------------------------------------------------------

    @property
    def device_free(self) -> int:
        return self._device.free

    @property
    def host_free(self) -> int:
        return self._host.free

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def holders(self) -> Iterator[Request]:
        return iter(self._held)

    def latest_holders(self) -> Iterator[Request]:
        return reversed(self._held)

    def holds(self, request: Request) -> bool:
        return request in self._held

    def is_settled(self, request: Request) -> bool:
        held = self._held.get(request)
        return held is not None and held.moving is None and not held.parts

    def slots(self, request: Request) -> tuple[int, ...]:
        """Return the request's block table: position p is in slots[p // block_size], at p % block_size."""
        return self._held[request].table

    def footprint_on_host(self, request: Request) -> int:
        held = self._held.get(request)
        return held.away if held else 0

    def filled(self, request: Request) -> int:
        held = self._held.get(request)
        return min(len(held.device), self.blocks_for(request.computed)) if held else 0

    def filled_after(self, request: Request, given_up: int) -> int:
        held = self._held.get(request)
        if held is None:
            return 0
        keep = self.filled(request)
        missing = given_up - (held.size + held.adopted - held.lent - keep)
        if held.borrows:  # borrowed blocks without KV stay with their owner
            missing += sum(at >= keep for at in held.borrows)
        while keep and missing > 0:
            keep -= 1
            missing -= len(self._holders.get(held.device[keep], ())) < 2  # other holders keep a shared block
        return keep

    def tokens_in(self, request: Request, blocks: int) -> int:
        return min(request.computed, blocks * self.block_size)

    def tokens_there(self, request: Request) -> int:
        held = self._held[request]
        return self.tokens_in(request, len(held.device)) - sum(end.saved for end in held.lends.values())

    @property
    def holder_count(self) -> int:
        return len(self._held)

    def shortfall(self, request: Request, tokens: int) -> int:
        held = self._held.get(request)
        if held is None:
            return max(0, self.blocks_for(tokens) - self.available)
        need = self.blocks_for(tokens) - len(held.device)
        if held.lends:
            need += self.extra(request, tokens)
        return max(0, need - self._unused_in_all(held) - self.available, need - self._device.free)

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        held, need = self._held.get(request), self.blocks_for(tokens) - self._device.free
        return need if held is None else need - len(held.device) + self.extra(request, tokens)

    @property
    def is_moving(self) -> bool:
        return any(self.blocks_in_transit.values())

    # -- allocation ---------------------------------------------------------------------------------------

    def claim(self, request: Request, blocks: int, *, tokens: int | None = None, lender: Lender = None) -> None:
        lent_by = self._claim_of(lender)
        held = self._holding(request)
        if held is lent_by or held in lent_by.lenders():
            raise LedgerError(f"request {request.id} claims blocks that it lends itself")
        if held.lender is not lent_by:
            held.join(lent_by)
        held.promised = blocks
        held.resize()
        request.claimed = UNLIMITED if tokens is None else tokens
        held.room = self._room(request, held)

    def grow(self, request: Request, tokens: int) -> RequestBlocks:
        held = self._holding(request)
        missing = self.blocks_for(tokens) - len(held.device)
        if held.moving is Direction.OUT or (held.away and held.moving is None):
            raise LedgerError(f"request {request.id} grows while its KV is not on the device")
        if missing > self._device.free:
            raise LedgerError(f"request {request.id} needs {missing} blocks, {self._device.free} are free")
        if missing > 0:
            held.device += self._device.take(missing)
            self._refresh(request, held)
        return held

    def growth(self, requests: Iterable[Request], steps: int) -> list[int] | None:
        """Return None also if a nested reservation would have to grow, or if any block is shared bidirectionally."""
        if self._ends:
            return None
        size, blocks = self.block_size, [0] * steps
        for request in requests:
            held = self._held[request]
            room = (held.size + held.adopted - held.lent) * size - request.planned
            if request.planned + steps > request.claimed or (room < steps and held.lender is not self._root):
                return None
            for step in range(room, steps, size):
                blocks[step] += 1
        return blocks if sum(blocks) <= self.available else None

    def expect(self, request: Request) -> None:
        held = self.grow(request, request.computed)
        if held.moving is not None:
            raise LedgerError(f"request {request.id} expects KV while its own is in transit")
        held.moving = Direction.IN

    def receive(self, request: Request) -> None:
        held = self._held[request]
        if held.moving is not Direction.IN or held.host:
            raise LedgerError(f"request {request.id} receives KV that it does not expect")
        held.moving = None

    def release(self, request: Request) -> None:
        """Free everything the request holds and reserves. Its nested reservations move to its parent."""
        held = self._held.get(request)
        if held is None:
            return
        if held.moving is not None:
            raise LedgerError(f"request {request.id} is released while its KV is in transit")
        self._forget_parts(held)
        del self._held[request]
        held.leave()
        request.claimed = UNLIMITED
        self._give_back(held, held.device)
        self._host.put(held.host)
        self._retract(request)
        if request.finish_reason is None:
            self.await_prefix(request)

    def clear(self) -> None:
        self._forget_blocks()

    @property
    def astray(self) -> tuple[int, int]:
        """Number of leaked blocks per tier, counted over all holders."""
        device, host = self._device, self._host
        held = self._held.values()
        return (
            device.total - device.free - sum(len(one.device) - one.adopted for one in held),
            host.total - host.free - sum(len(one.host) for one in held) - sum(1 for _ in self._copies()),
        )

    def recover(self) -> int:
        held = self._held.values()
        lost = self._device.recover({block for one in held for block in one.device})
        for block in lost:
            self._holders.pop(block, None)
        return len(lost) + len(self._host.recover({*self._copies(), *(block for one in held for block in one.host)}))

    # -- moves --------------------------------------------------------------------------------------------

    def trim(self, request: Request) -> None:
        """Cancel the reservation and free blocks without KV. Nested reservations move to the parent."""
        self._cut(request, self._held[request], self.filled(request))

    def move_out(self, request: Request, *, blocking: bool, keep: int = 0, before: Move | None = None) -> Move | None:
        held = self._held[request]
        if not self.can_move_out(request, keep=keep):
            raise LedgerError(f"request {request.id} cannot be moved out")
        self.trim(request)
        move = self._out_of_shared(request, held, keep) if held.lends else self._out_of(request, held, keep)
        if blocking:
            self._cut(request, held, keep)
        if move is not None and before is not None:
            move = self._joined(move, before)
        move = move or before
        return self._begin(held, move) if move is not None else None

    def _out_of(self, request: Request, held: RequestBlocks, keep: int) -> Move:
        source = held.device[keep:]
        target = self._host.take(len(source))
        tokens = self.tokens_in(request, len(held.device)) - self.tokens_in(request, keep)
        held.host[:0] = target
        return Move(Direction.OUT, request, tuple(source), tuple(target), tokens)

    def _out_of_shared(self, request: Request, held: RequestBlocks, keep: int) -> Move | None:
        """Return the move for a request that lends blocks; slots that are saved already are left out."""
        copies, target, size = Copies.none(), list[int](), self.block_size
        for index in range(keep, len(held.device)):
            end, saved, copy = held.lends.get(index), 0, None
            if end is not None:
                saved, copy, end.copy = end.saved, end.copy, None
            if copy is None:
                (copy,) = self._host.take(1)
            target.append(copy)
            rest = self._filled_slots(held, index) - saved
            copies.add(held.device[index], copy, Span(size - rest, rest))
        held.host[:0] = target
        return copies.move(Direction.OUT, request) if copies.source else None

    def can_move_out(self, request: Request, *, keep: int = 0, blocking: bool = True) -> bool:
        """Return whether the KV can be swapped out now. Lent blocks leave with blocking moves only."""
        held = self._held.get(request)
        if held is None or held.moving is not None or request.in_flight or (held.lends and not blocking):
            return False
        moved = self.filled(request) - keep
        return 0 < moved <= self._host.free + sum(index >= keep for index in held.lends)

    def drop(self, request: Request, *, keep: int = 0) -> None:
        held = self._held[request]
        if not keep:
            self.release(request)
            return
        if held.moving is not None:
            raise LedgerError(f"request {request.id} drops KV while it is in transit")
        self._forget_parts(held, keep)
        held.regains = request.computed
        self._free_host(held)
        self._cut(request, held, keep)

    def move_in(self, request: Request) -> Move:
        held = self._held[request]
        if not self.can_move_in(request):
            raise LedgerError(f"request {request.id} cannot be moved in")
        tokens = request.computed - self.tokens_in(request, len(held.device))
        target = self._device.take(len(held.host))
        held.device += target
        self._refresh(request, held)
        return self._begin(held, Move(Direction.IN, request, tuple(held.host), tuple(target), tokens))

    def restore(self, request: Request, tokens: int) -> list[Move]:
        """Swap in all of the request's KV. Its slots in blocks that a borrower has overwritten go to other blocks."""
        held = self._held[request]
        if not held.overwritten:
            back = [self.move_in(request)] if held.host else []
            return [*self.take_back(request, tokens), *back]
        if held.host:  # one move carries both
            size, first = self.block_size, len(held.device)
            target = self._device.take(len(held.host))
            copies = [
                (here, there, Span(size - (filled := self._filled_slots(held, first + place)), filled))
                for place, (here, there) in enumerate(zip(held.host, target, strict=True))
            ]
            held.device += target
            return self.take_back(request, tokens, copies)
        return self.take_back(request, tokens)

    def can_move_in(self, request: Request) -> bool:
        held = self._held.get(request)
        if held is None or held.moving is not None or held.overwritten:
            return False
        return 0 < len(held.host) <= self._unused_in_all(held) + self.available

    def land(self, move: Move) -> int | None:
        held, part = self._end(move)
        if held is None:
            if move.request is None:
                self._host_cache.end(has_landed=True)
            return None
        if move.direction is Direction.IN:
            self._free_host(held)
            held.is_private = held.is_private or not self._is_exact
        elif part is None and move.direction is Direction.OUT and _is_held(held, move):
            self._cut(held.request, held, len(held.device) - len(move.source))
        if part is None and move.direction is Direction.OUT and not move.spans:
            self._name_on_host(held, move)
        return _lost_from(held)

    def recall(self, move: Move) -> None:
        """Cancel a blocking swap-out. Another move replaces it, or its KV is dropped."""
        self.land(move)
        self._host_cache.forget(move.target)

    def fail(self, move: Move) -> int | None:
        held, part = self._end(move)
        if held is None:
            if move.request is None:
                self._host_cache.end(has_landed=False)
            return None
        if part is not None:
            keep = min(part, len(held.device))
        elif move.direction is Direction.OUT and _is_held(held, move):
            self._free_host(held, len(move.target))
            return None
        elif move.direction is Direction.OUT:
            keep = len(held.device)
            self._host_cache.forget(move.target)
        else:
            keep = held.device.index(move.target[0])
            if move.direction is Direction.IN:  # otherwise the request would hit it again and fail again
                self._host_cache.forget(move.source)
        if part is None and move.direction is not Direction.WITHIN:
            self._free_host(held)
        held.lost_from = keep if held.lost_from is None else min(keep, held.lost_from)
        return _lost_from(held)

    def keep_cached(self, depth: int) -> Move | None:
        """Start an overlapped copy of cached blocks; None if there are none, or if a copy is in transit."""
        move = self._host_cache.begin(depth)
        if move is not None:
            self.blocks_in_transit[Direction.OUT] += len(move.source)
        return move

    def _name_on_host(self, held: RequestBlocks, move: Move) -> None:
        """Register swapped-out blocks in the prefix cache, where they can be found once the request frees them."""
        request = held.request
        if request.prefix is None or held.is_private or not held.host or held.host[0] != move.target[0]:
            return
        first = len(held.device)
        keys = request.keys(request.computed)[first : request.computed // self.block_size]
        for block, key in zip(move.target, keys, strict=False):
            self._host_cache.name(block, key)

    def _copies(self) -> Iterator[int]:
        """Iterate over the CPU-tier blocks with KV that no request holds and that are not in the prefix cache."""
        return chain(self.copies(), self._host_cache.targets)

    # -- consistency check --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `LedgerError` unless the state is consistent.

        Each block of both tiers is in exactly one place, each request holds blocks for its computed tokens, and cached
        values agree with their sources.
        """
        for tier, pool in (("device", self._device), ("host", self._host)):
            places = [*pool.free_blocks(), *(self._copies() if pool is self._host else ())]
            for held in self._held.values():
                places += held.device if pool is self._device else held.host
            if sorted(places) != sorted([*range(pool.total), *self._doubly_held(pool)]):
                raise LedgerError(f"a {tier} block leaked or doubled")
        if any(self.astray):
            raise LedgerError(f"{self.astray} blocks are astray by the count")
        self._check_sharing()
        self._check_ends()
        self._check_claims()
        for request, held in self._held.items():
            need, there = self.blocks_for(request.computed), len(held.device) + len(held.host) - _held_twice(held)
            if need > there:
                raise LedgerError(f"request {request.id} has computed more than its blocks carry")
            if need < there and held.host and held.moving is not Direction.IN:
                raise LedgerError(f"request {request.id} holds blocks on the host behind those that it has filled")
            if held.table != tuple(held.device) or held.room != self._room(request, held):
                raise LedgerError(f"request {request.id} has a stale block table")
        moving = dict.fromkeys(Direction, 0)
        for held in self._held.values():
            if held.move is not None or held.aside is not None or held.parts:
                for move in filter(None, (held.move, held.aside, *held.parts)):
                    moving[move.direction] += len(move.source)
        moving[Direction.OUT] += len(self._idle_parts) + len(self._host_cache.targets)
        if moving != self.blocks_in_transit:
            raise LedgerError(f"{self.blocks_in_transit} blocks are counted as in transit, {moving} are")

    def _cut(self, request: Request, held: RequestBlocks, keep: int) -> None:
        """Shrink the request to its first `keep` device blocks, without a reservation beyond them."""
        held.hand_over()
        held.promised = 0
        if request.claimed != UNLIMITED:
            request.claimed = 0
        gone = held.device[keep:]
        del held.device[keep:]
        held.keyed = min(held.keyed, keep)
        self._give_back(held, gone)
        self._refresh(request, held)
        if not keep and held.lender is not self._root:
            held.join(self._root)

    def _joined(self, first: Move, second: Move) -> Move:
        """Return one move for two moves of adjacent blocks."""
        if first.spans or second.spans:
            first, second = self._spanned(first), self._spanned(second)
        return first._replace(
            source=first.source + second.source,
            target=first.target + second.target,
            tokens=first.tokens + second.tokens,
            spans=first.spans + second.spans,
        )

    def _spanned(self, move: Move) -> Move:
        """Return the move with explicit spans."""
        if move.spans:
            return move
        assert move.request is not None
        size, reverse = self.block_size, move.request.reverse
        counts = [min(size, move.tokens - index * size) for index in range(len(move.source))]
        return move._replace(spans=tuple(Span(size - count if reverse else 0, count) for count in counts))

    def _free_host(self, held: RequestBlocks, blocks: int | None = None) -> None:
        """Free the first `blocks` CPU-tier blocks of the request, or all if None."""
        self._host.put(held.host[:blocks])
        del held.host[:blocks]


def _is_held(held: RequestBlocks, move: Move) -> bool:
    """Return whether the request still holds the source of a swap-out, as it does if the move is overlapped."""
    return bool(held.device) and held.device[-1] == move.source[-1]


def _held_twice(held: RequestBlocks) -> int:
    """Return the number of KV blocks in transit for which the request holds blocks on both tiers."""
    move = held.move
    if move is None or (move.direction is Direction.OUT and not _is_held(held, move)):
        return 0
    return len(move.source)


def _lost_from(held: RequestBlocks) -> int | None:
    """Return the index of the first device block whose KV is lost, once none of the request's moves is in transit."""
    keep = held.lost_from
    if keep is None or held.moving is not None:
        return None
    held.lost_from = None
    return min(keep, len(held.device))
