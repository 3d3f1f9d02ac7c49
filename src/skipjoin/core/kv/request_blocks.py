from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.reservations import Reservation
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move


@dataclass(eq=False, slots=True)
class SharedBlock:
    """Bidirectional block: its owner fills it from the last slot down, the borrower from the first slot up."""

    block: int
    owner: RequestBlocks
    index: int
    copy: int | None  # CPU-tier block with the saved slots; None once it is part of the owner's swapped-out blocks
    borrower: RequestBlocks | None = None  # None after it left while some of the owner's slots are still saved
    at: int = 0
    split: int = 0  # first slot that the owner may fill
    saved: int = 0  # number of the owner's lowest slots that the borrower overwrites


@dataclass(eq=False, slots=True)
class Sharing:
    owned: dict[int, SharedBlock] = field(default_factory=dict)
    borrowed: dict[int, SharedBlock] = field(default_factory=dict)
    overwritten: int = 0


@dataclass(eq=False, slots=True)
class Transit:
    """Moves of one request in transit; changed by `Transfers`."""

    direction: Direction | None = None
    move: Move | None = None  # between the tiers; None while KV arrives from another engine
    aside: Move | None = None
    saves: dict[Move, int] = field(default_factory=dict)  # of slots that a borrower overwrites, with the block index
    lost_from: int | None = None  # first device block that a failed move lost, while another move is in transit


@dataclass(eq=False, slots=True)
class RequestBlocks:
    """Blocks of one request, with one part for each part of the ledger."""

    request: Request
    block_size: int
    device: list[int]
    reservation: Reservation
    cpu: list[int] = field(default_factory=list)
    tokens_before_drop: int = 0
    keyed: int = 0  # number of first device blocks that were offered to the prefix cache
    is_private: bool = False  # new KV is not cached, because inexact KV was swapped in
    sharing: Sharing = field(default_factory=Sharing)
    transit: Transit = field(default_factory=Transit)
    table: tuple[int, ...] = ()
    room: int = 0
    swapped_out: int = 0
    moving: Direction | None = None
    is_settled: bool = True

    def refresh(self) -> None:
        self.table = tuple(self.device)
        self.reservation.resize()
        self.refresh_room()

    def refresh_room(self) -> None:
        self.room, self.swapped_out, self.moving, self.is_settled = self._summary()

    def _summary(self) -> tuple[int, int, Direction | None, bool]:
        moving, swapped_out = self.transit.direction, len(self.cpu) + self.sharing.overwritten
        room = 0 if swapped_out or moving is not None else self._room()
        return room, swapped_out, moving, moving is None and not self.transit.saves

    def _room(self) -> int:
        size, sharing = self.block_size, self.sharing
        room = min(len(self.device) * size, self.request.progress.reserved_tokens)
        last = sharing.owned.get(len(self.device) - 1) if sharing.owned else None
        if last is not None and last.borrower is not None:
            room = min(room, (last.index + 1) * size - last.split)
        for at, shared in sharing.borrowed.items():
            if shared.split < size:
                return min(room, at * size + shared.split)
        return room

    def check(self) -> None:
        request, move, direction = self.request, self.transit.move, self.transit.direction
        need, there = -(-request.progress.computed // self.block_size), len(self.device) + len(self.cpu)
        if move is not None and (direction is not Direction.OUT or self.holds_source(move)):
            there -= len(move.source)  # on both tiers meanwhile
        if need > there:
            raise LedgerError(f"request {request.id} has computed more than its blocks carry")
        if need < there and self.cpu and direction is not Direction.IN:
            raise LedgerError(f"request {request.id} holds CPU-tier blocks behind those that it has filled")
        if self.table != tuple(self.device):
            raise LedgerError(f"request {request.id} has a stale block table")
        if (self.room, self.swapped_out, self.moving, self.is_settled) != self._summary():
            raise LedgerError(f"request {request.id} has a stale summary of its blocks")

    def holds_source(self, move: Move) -> bool:
        return bool(self.device) and self.device[-1] == move.source[-1]


class Holders:
    """Holders of blocks with keys and of bidirectional blocks: not of blocks without keys that one request holds.

    The first holder counts a block in its reservation; the others adopt it.
    """

    def __init__(self) -> None:
        self.of: dict[int, list[RequestBlocks]] = {}

    def add(self, block: int, held: RequestBlocks) -> None:
        if (holders := self.of.get(block)) is None:
            self.of[block] = [held]
            return
        if len(holders) == 1:
            holders[0].reservation.shared += 1
        holders.append(held)
        held.reservation.adopted += 1

    def remove(self, block: int, held: RequestBlocks) -> bool:
        """Remove a holder, and return whether others remain. The caller resizes its reservation."""
        holders = self.of.get(block)
        if holders is None:
            return False
        first = holders[0]
        holders.remove(held)
        if not holders:
            del self.of[block]
            return False
        if held is not first:
            held.reservation.adopted -= 1
        else:
            held.reservation.shared -= 1
            heir = holders[0].reservation
            heir.adopted -= 1
            heir.shared += 1
            heir.resize()
        if len(holders) == 1:
            holders[0].reservation.shared -= 1
        return True

    def is_shared(self, block: int) -> bool:
        return len(self.of.get(block, ())) > 1

    def within(self, some: Collection[RequestBlocks]) -> int:
        if not any(held.reservation.shared for held in some):
            return 0
        return sum(len(holders) > 1 and set(some).issuperset(holders) for holders in self.of.values())

    def counted(self, held: RequestBlocks) -> Iterable[int]:
        if not held.reservation.adopted:
            return held.device
        return [block for block in held.device if self.of.get(block, (held,))[0] is held]

    def check(self, requests: Collection[RequestBlocks]) -> None:
        found: dict[int, list[RequestBlocks]] = {block: [] for block in self.of}
        for held in requests if found else ():
            for block in held.device:
                if block in found:
                    found[block].append(held)
        adopted, shared = dict.fromkeys(requests, 0), dict.fromkeys(requests, 0)
        for block, holders in self.of.items():
            if set(found[block]) != set(holders) or len(found[block]) != len(holders):
                raise LedgerError(f"device block {block} is held by other requests than is known")
            for held in holders[1:]:
                adopted[held] += 1
            if len(holders) > 1:
                shared[holders[0]] += 1
        for held in requests:
            if (held.reservation.adopted, held.reservation.shared) != (adopted[held], shared[held]):
                raise LedgerError(f"request {held.request.id} counts other blocks as shared than are")
