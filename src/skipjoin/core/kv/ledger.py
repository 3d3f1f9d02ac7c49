"""KVLedger: the one owner of KV block accounting on both tiers; planners know it as `Ledger` (`core.kv.interface`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from skipjoin.core.kv.reservation_tree import LedgerError, RequestBlocks
from skipjoin.core.kv.reservations import Lender
from skipjoin.core.kv.shared_blocks import Copies, TwoEnds
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.step import Direction, Move, Span


class KVLedger(TwoEnds):
    """Which request holds which blocks on which tier, what is claimed, what is in transit.

    The first blocks of a request lie on the device and the ones that follow on the host; mostly all lie on one tier.
    While a move is in transit the request cannot be moved again or released; blocks that the move still reads are
    *fenced*: neither free nor usable until `land`. Blocks are handed out in a fixed order, so that a trace repeats
    exactly.

    device_blocks, host_blocks: pool sizes in blocks. block_size: tokens per block. is_exact: whether KV comes back from
    the host as it went there: others use it only then.
    blocks_of: what a request holds, or None; to be read, and changed by the ledger alone.
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
        # Asked for every request of every step: the dictionary answers itself.
        self.blocks_of: Callable[[Request], RequestBlocks | None] = self._held.get

    # -- questions ----------------------------------------------------------------------------------------

    @property
    def device_free(self) -> int:
        """Device blocks that no request holds and no move reads."""
        return self._device.free

    @property
    def host_free(self) -> int:
        """Host blocks that no request holds and no move reads."""
        return self._host.free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that carry `tokens` tokens."""
        return -(-tokens // self.block_size)

    def holders(self) -> Iterator[Request]:
        """Every request that holds anything, in the order in which they began to."""
        return iter(self._held)

    def latest_holders(self) -> Iterator[Request]:
        """The same, the latest first."""
        return reversed(self._held)

    def holds(self, request: Request) -> bool:
        """Whether the request holds or claims anything."""
        return request in self._held

    def is_settled(self, request: Request) -> bool:
        """Whether the request holds something and none of it is in transit."""
        held = self._held.get(request)
        return held is not None and held.moving is None and not held.parts

    def slots(self, request: Request) -> tuple[int, ...]:
        """The device blocks of the request, in the order of its tokens: position p lies in
        slots[p // block_size], at p % block_size."""
        return self._held[request].table

    def footprint_on_host(self, request: Request) -> int:
        """Host blocks with KV of the request."""
        held = self._held.get(request)
        return held.away if held else 0

    def filled(self, request: Request) -> int:
        """Device blocks that hold computed KV of the request: the first ones that it has there."""
        held = self._held.get(request)
        return min(len(held.device), self.blocks_for(request.computed)) if held else 0

    def filled_after(self, request: Request, given_up: int) -> int:
        """The same once its lender has got so many blocks of its footprint back: what is claimed and not held goes
        first, then blocks without KV, then the last ones with KV."""
        held = self._held.get(request)
        if held is None:
            return 0
        keep = self.filled(request)
        missing = given_up - (held.size + held.adopted - held.lent - keep)
        if held.borrows:  # blocks without KV that stay with their owner
            missing += sum(at >= keep for at in held.borrows)
        while keep and missing > 0:
            keep -= 1
            missing -= len(self._holders.get(held.device[keep], ())) < 2  # else it stays with the others
        return keep

    def tokens_in(self, request: Request, blocks: int) -> int:
        """Computed tokens of the request that its first `blocks` blocks hold."""
        return min(request.computed, blocks * self.block_size)

    def tokens_there(self, request: Request) -> int:
        """Computed tokens of the request whose KV is on the device."""
        held = self._held[request]
        return self.tokens_in(request, len(held.device)) - sum(end.saved for end in held.lends.values())

    @property
    def holder_count(self) -> int:
        """How many requests hold anything."""
        return len(self._held)

    def shortfall(self, request: Request, tokens: int) -> int:
        """Device blocks that must become available before the request can hold `tokens` tokens there."""
        held = self._held.get(request)
        if held is None:
            return max(0, self.blocks_for(tokens) - self.available)
        need = self.blocks_for(tokens) - len(held.device)
        if held.lends:
            need += self.extra(request, tokens)
        return max(0, need - self._unused_in_all(held) - self.available, need - self._device.free)

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        """Free blocks that the request lacks to hold `tokens` tokens on the device, whatever is claimed. Negative: more
        than enough are free."""
        held, need = self._held.get(request), self.blocks_for(tokens) - self._device.free
        return need if held is None else need - len(held.device) + self.extra(request, tokens)

    @property
    def is_moving(self) -> bool:
        """Whether any KV is in transit."""
        return any(self.blocks_in_transit.values())

    # -- holding ------------------------------------------------------------------------------------------

    def claim(self, request: Request, blocks: int, *, tokens: int | None = None, lender: Lender = None) -> None:
        """Let the request have `blocks` device blocks in all, out of what `lender` has, for `tokens` tokens at most;
        None: without a limit. The claim that it has ends. Ask `shortfall_of_claim` first."""
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
        """Give the request device blocks for `tokens` tokens in all; ask `shortfall` first."""
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
        """How many blocks beyond their claims these requests need in each of `steps` steps that compute one more token
        of each. None: more than are available, or a claim does not reach that far, or is lent and has to grow, or
        requests fill blocks from both ends."""
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
        """Give the request device blocks for its computed tokens, whose KV is on its way from another engine: they are
        fenced until `receive`."""
        held = self.grow(request, request.computed)
        if held.moving is not None:
            raise LedgerError(f"request {request.id} expects KV while its own is in transit")
        held.moving = Direction.IN

    def receive(self, request: Request) -> None:
        """The KV that the request expects is there: lift its fence."""
        held = self._held[request]
        if held.moving is not Direction.IN or held.host:
            raise LedgerError(f"request {request.id} receives KV that it does not expect")
        held.moving = None

    def release(self, request: Request) -> None:
        """Take back everything the request holds and claims; no effect if that is nothing. Its guests stay, and their
        lender is its own."""
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
        """Begin again with nothing held, claimed or in transit: all that lay on either tier is lost."""
        self._forget_blocks()

    @property
    def astray(self) -> tuple[int, int]:
        """Blocks of the device and of the host that are neither free nor held, where there should be none; negative:
        more are free or held than there are. It takes a look at each request that holds anything."""
        device, host = self._device, self._host
        held = self._held.values()
        return (
            device.total - device.free - sum(len(one.device) - one.adopted for one in held),
            host.total - host.free - sum(len(one.host) for one in held) - sum(1 for _ in self._copies()),
        )

    def recover(self) -> int:
        """Free all blocks that are astray; how many they were."""
        held = self._held.values()
        lost = self._device.recover({block for one in held for block in one.device})
        for block in lost:
            self._holders.pop(block, None)
        return len(lost) + len(self._host.recover({*self._copies(), *(block for one in held for block in one.host)}))

    # -- moving -------------------------------------------------------------------------------------------

    def trim(self, request: Request) -> None:
        """End the request's claim and free its device blocks without KV: beyond what it holds it has to ask anew, and
        its guests are lent theirs by its lender."""
        self._cut(request, self._held[request], self.filled(request))

    def move_out(self, request: Request, *, blocking: bool, keep: int = 0, before: Move | None = None) -> Move | None:
        """Begin moving the request's computed KV to the host, but for the first `keep` blocks that it has on the
        device. Blocks beyond the KV are freed at once, and the claim ends, as with `trim`. None: all of it is saved
        there.

        blocking: the copy is taken before the plan's slices run, so the device blocks are free at once;
        otherwise they are fenced until `land`. before: a blocking move of the same plan, which carries what follows,
        and which ended with `recall`: the move takes its place.
        """
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
        """What moves all blocks behind the first ones to the host."""
        source = held.device[keep:]
        target = self._host.take(len(source))
        tokens = self.tokens_in(request, len(held.device)) - self.tokens_in(request, keep)
        held.host[:0] = target
        return Move(Direction.OUT, request, tuple(source), tuple(target), tokens)

    def _out_of_shared(self, request: Request, held: RequestBlocks, keep: int) -> Move | None:
        """What moves to the host what is not there of all blocks behind the first ones, of which some are lent."""
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
        """Whether the request has KV on the device behind the first `keep` blocks, nothing of it is in transit, and the
        host has enough free blocks. What it lends leaves with blocking moves only."""
        held = self._held.get(request)
        if held is None or held.moving is not None or request.in_flight or (held.lends and not blocking):
            return False
        moved = self.filled(request) - keep
        return 0 < moved <= self._host.free + sum(index >= keep for index in held.lends)

    def drop(self, request: Request, *, keep: int = 0) -> None:
        """Give up the request's KV and claim, but for the first `keep` blocks that it has on the device, which are all
        full."""
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
        """Begin moving the request's KV back to the device. The host blocks are fenced until `land`."""
        held = self._held[request]
        if not self.can_move_in(request):
            raise LedgerError(f"request {request.id} cannot be moved in")
        tokens = request.computed - self.tokens_in(request, len(held.device))
        target = self._device.take(len(held.host))
        held.device += target
        self._refresh(request, held)
        return self._begin(held, Move(Direction.IN, request, tuple(held.host), tuple(target), tokens))

    def restore(self, request: Request, tokens: int) -> list[Move]:
        """Begin moving all of the request's KV that is on the host back to the device with blocking moves, and what it
        has in blocks in which another one has taken slots to others. Ask `shortfall` first, which counts what `tokens`
        tokens need."""
        held = self._held[request]
        if not held.overwritten:
            back = [self.move_in(request)] if held.host else []
            return [*self.take_back(request, tokens), *back]
        if held.host:  # they return as one
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
        """Whether the request has whole blocks on the host, nothing of it is in transit, and the device has enough
        blocks for it that others do not claim."""
        held = self._held.get(request)
        if held is None or held.moving is not None or held.overwritten:
            return False
        return 0 < len(held.host) <= self._unused_in_all(held) + self.available

    def land(self, move: Move) -> int | None:
        """The move has ended well: lift its fence. Returns what `fail` would, of a move before it."""
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
        """The blocking move out of a plan that is still being made is not made after all: either another one does what
        it would have done, or what it would have moved is dropped."""
        self.land(move)
        self._host_cache.forget(move.target)

    def fail(self, move: Move) -> int | None:
        """The move has ended badly. None: no KV is lost, it lies where it did, or moves of the request are in transit
        whose end tells. Otherwise only so many device blocks of the request, the first ones, still hold KV; the rest is
        to be given up with `drop`."""
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
            if move.direction is Direction.IN:  # else the request would find it there again, and fail to get it again
                self._host_cache.forget(move.source)
        if part is None and move.direction is not Direction.WITHIN:
            self._free_host(held)
        held.lost_from = keep if held.lost_from is None else min(keep, held.lost_from)
        return _lost_from(held)

    def keep_cached(self, depth: int) -> Move | None:
        """Begin to copy to the host what the device has cached and is about to lose: an overlapped move, of no request.
        None: there is nothing, or a copy is under way. depth: plans that may be in flight at once."""
        move = self._host_cache.begin(depth)
        if move is not None:
            self.blocks_in_transit[Direction.OUT] += len(move.source)
        return move

    def _name_on_host(self, held: RequestBlocks, move: Move) -> None:
        """What the move has brought to the host is found there once the request does not hold it any more."""
        request = held.request
        if request.prefix is None or held.is_private or not held.host or held.host[0] != move.target[0]:
            return
        first = len(held.device)
        keys = request.prefix.keys(request, request.computed)[first : request.computed // self.block_size]
        for block, key in zip(move.target, keys, strict=False):
            self._host_cache.name(block, key)

    def _copies(self) -> Iterator[int]:
        """The host blocks with KV that no request holds, and that cannot be found."""
        return chain(self.copies(), self._host_cache.targets)

    # -- the proof ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `LedgerError` unless every block on both tiers is in exactly one place, every request's computed
        tokens lie in blocks that it holds, and what is kept for speed agrees with what it is kept from."""
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
        """Leave the request its first `keep` device blocks, and no claim beyond them."""
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
        """Two moves of neighbouring blocks as one."""
        if first.spans or second.spans:
            first, second = self._spanned(first), self._spanned(second)
        return first._replace(
            source=first.source + second.source,
            target=first.target + second.target,
            tokens=first.tokens + second.tokens,
            spans=first.spans + second.spans,
        )

    def _spanned(self, move: Move) -> Move:
        """The move, with the slots that it copies."""
        if move.spans:
            return move
        assert move.request is not None
        size, reverse = self.block_size, move.request.reverse
        counts = [min(size, move.tokens - index * size) for index in range(len(move.source))]
        return move._replace(spans=tuple(Span(size - count if reverse else 0, count) for count in counts))

    def _free_host(self, held: RequestBlocks, blocks: int | None = None) -> None:
        """Free the first `blocks` host blocks of the request; None: all."""
        self._host.put(held.host[:blocks])
        del held.host[:blocks]


def _is_held(held: RequestBlocks, move: Move) -> bool:
    """Whether the device blocks that a move out reads are still the request's: they are after an overlapped one."""
    return bool(held.device) and held.device[-1] == move.source[-1]


def _held_twice(held: RequestBlocks) -> int:
    """Blocks of KV for which the request holds blocks on both tiers, as a move copies them."""
    move = held.move
    if move is None or (move.direction is Direction.OUT and not _is_held(held, move)):
        return 0
    return len(move.source)


def _lost_from(held: RequestBlocks) -> int | None:
    """The first device block whose KV is lost, once the request's blocks are not in transit any more."""
    keep = held.lost_from
    if keep is None or held.moving is not None:
        return None
    held.lost_from = None
    return min(keep, len(held.device))
