"""KVLedger: the one owner of KV block accounting on both tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move


class LedgerError(AssertionError):
    """Block accounting is broken: a block leaked, doubled, or was used out of turn."""


@dataclass(slots=True)
class RequestBlocks:
    """What one request holds: blocks on one tier, a promise, and maybe a move that has not landed.

    room: tokens that the device blocks can carry. table: the device blocks as a frozen value for plans.
    promised: blocks it may claim in all, held ones included. A promise is not a block.
    """

    device: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    room: int = 0
    table: tuple[int, ...] = ()
    promised: int = 0
    moving: Direction | None = None


class KVLedger:
    """Which request holds which blocks on which tier, what is promised, what is in transit.

    A request's blocks lie on one tier, or are in transit between the two. While a move is in transit the request
    cannot be moved again or released; blocks that the move still reads are *fenced*: neither free nor usable until
    `land`. Blocks are handed out in a fixed order, so that a trace repeats exactly.

    device_blocks, host_blocks: pool sizes in blocks. block_size: tokens per block.
    blocks_of: what a request holds, or None; to be read, and changed by the ledger alone.
    """

    def __init__(self, device_blocks: int, host_blocks: int, block_size: int) -> None:
        for name, value, low in (
            ("device_blocks", device_blocks, 1),
            ("host_blocks", host_blocks, 0),
            ("block_size", block_size, 1),
        ):
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        self.block_size = block_size
        self.device_total = device_blocks
        self.host_total = host_blocks
        self.promised_idle = 0  # blocks promised but not held, over all requests
        self.blocks_in_transit = dict.fromkeys(Direction, 0)
        self._device_free: list[int] = []
        self._host_free: list[int] = []
        self._held: dict[Request, RequestBlocks] = {}
        # Asked for every request of every step: the dictionary answers itself.
        self.blocks_of: Callable[[Request], RequestBlocks | None] = self._held.get
        self.clear()

    # -- questions ----------------------------------------------------------------------------------------

    @property
    def device_free(self) -> int:
        """Device blocks that no request holds and no move reads."""
        return len(self._device_free)

    @property
    def host_free(self) -> int:
        """Host blocks that no request holds and no move reads."""
        return len(self._host_free)

    @property
    def available(self) -> int:
        """Free device blocks that are not promised to any request. Negative where promises exceed free blocks."""
        return len(self._device_free) - self.promised_idle

    def blocks_for(self, tokens: int) -> int:
        """Blocks that carry `tokens` tokens."""
        return -(-tokens // self.block_size)

    def holders(self) -> Iterator[Request]:
        """Every request that holds anything, in the order in which they began to."""
        return iter(self._held)

    def is_settled(self, request: Request) -> bool:
        """Whether the request holds something and none of it is in transit."""
        held = self._held.get(request)
        return held is not None and held.moving is None

    def slots(self, request: Request) -> tuple[int, ...]:
        """The device blocks of the request, in the order of its tokens: position p lies in
        slots[p // block_size], at p % block_size."""
        return self._held[request].table

    def footprint(self, request: Request) -> int:
        """Device blocks that become available if the request gives up all it holds and is promised."""
        held = self._held.get(request)
        return max(held.promised, len(held.device)) if held else 0

    def footprint_on_host(self, request: Request) -> int:
        """Host blocks that the request holds."""
        held = self._held.get(request)
        return len(held.host) if held else 0

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
        own = max(0, held.promised - len(held.device))
        return max(0, need - own - self.available, need - len(self._device_free))

    @property
    def is_moving(self) -> bool:
        """Whether any KV is in transit."""
        return any(self.blocks_in_transit.values())

    # -- holding ------------------------------------------------------------------------------------------

    def promise(self, request: Request, blocks: int) -> None:
        """Let the request claim `blocks` device blocks in all."""
        held = self._held.setdefault(request, RequestBlocks())
        self._set_promise(held, blocks)

    def grow(self, request: Request, tokens: int) -> RequestBlocks:
        """Give the request device blocks for `tokens` tokens in all; ask `shortfall` first."""
        held = self._held.setdefault(request, RequestBlocks())
        missing = self.blocks_for(tokens) - len(held.device)
        if held.moving is Direction.OUT or (held.host and held.moving is None):
            raise LedgerError(f"request {request.id} grows while its KV is not on the device")
        if missing > len(self._device_free):
            raise LedgerError(f"request {request.id} needs {missing} blocks, {len(self._device_free)} are free")
        if missing > 0:
            idle = max(0, held.promised - len(held.device))
            for _ in range(missing):
                held.device.append(self._device_free.pop())
            self.promised_idle += max(0, held.promised - len(held.device)) - idle
            self._refresh(held)
        return held

    def release(self, request: Request) -> None:
        """Take back everything the request holds and is promised; no effect if that is nothing."""
        held = self._held.get(request)
        if held is None:
            return
        if held.moving is not None:
            raise LedgerError(f"request {request.id} is released while its KV is in transit")
        del self._held[request]
        self.promised_idle -= max(0, held.promised - len(held.device))
        self._device_free.extend(reversed(held.device))
        self._host_free.extend(reversed(held.host))

    def clear(self) -> None:
        """Begin again with nothing held, promised or in transit: all that lay on either tier is lost."""
        self.promised_idle = 0
        self.blocks_in_transit = dict.fromkeys(Direction, 0)
        # Popped from the end, so the lowest block numbers go first.
        self._device_free = list(range(self.device_total - 1, -1, -1))
        self._host_free = list(range(self.host_total - 1, -1, -1))
        self._held.clear()

    # -- moving -------------------------------------------------------------------------------------------

    def move_out(self, request: Request, *, blocking: bool) -> Move:
        """Begin moving the request's computed KV to the host. Blocks beyond it are freed at once.

        blocking: the copy is taken before the plan's slices run, so the device blocks are free at once;
        otherwise they are fenced until `land`. The promise ends either way.
        """
        held = self._held[request]
        blocks = self.blocks_for(request.computed)
        if not self.can_move_out(request):
            raise LedgerError(f"request {request.id} cannot be moved out")
        self._set_promise(held, 0)
        source, beyond = held.device[:blocks], held.device[blocks:]
        self._device_free.extend(reversed(beyond))
        held.host = [self._host_free.pop() for _ in range(blocks)]
        held.device = [] if blocking else source
        if blocking:
            self._device_free.extend(reversed(source))
        self._refresh(held)
        return self._begin(held, Move(Direction.OUT, request, tuple(source), tuple(held.host), request.computed))

    def can_move_out(self, request: Request) -> bool:
        """Whether the request's KV is settled on the device and the host has enough free blocks."""
        held = self._held.get(request)
        if held is None or held.moving is not None or held.host or request.in_flight:
            return False
        return 0 < self.blocks_for(request.computed) <= len(self._host_free)

    def move_in(self, request: Request) -> Move:
        """Begin moving the request's KV back to the device. The host blocks are fenced until `land`."""
        held = self._held[request]
        if not self.can_move_in(request):
            raise LedgerError(f"request {request.id} cannot be moved in")
        held.device = [self._device_free.pop() for _ in held.host]
        self._refresh(held)
        return self._begin(held, Move(Direction.IN, request, tuple(held.host), tuple(held.device), request.computed))

    def can_move_in(self, request: Request) -> bool:
        """Whether the request's KV is settled on the host and the device has enough blocks that are not promised."""
        held = self._held.get(request)
        return held is not None and held.moving is None and 0 < len(held.host) <= self.available

    def land(self, move: Move) -> None:
        """The move has ended well: lift its fence."""
        held = self._end(move)
        if move.direction is Direction.OUT:
            self._free_device(held)
        else:
            self._free_host(held)

    def fail(self, move: Move) -> bool:
        """The move has ended badly. True: the request's KV is whole, and on the device as before. False: it is lost,
        and the request is to be released."""
        held = self._end(move)
        self._free_host(held)
        return move.direction is Direction.OUT and bool(held.device)

    # -- the proof ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `LedgerError` unless every block on both tiers is in exactly one place, every request's computed
        tokens lie in blocks that it holds, and what is kept for speed agrees with what it is kept from."""
        for tier, total, free in (
            ("device", self.device_total, self._device_free),
            ("host", self.host_total, self._host_free),
        ):
            places = Counter(free)
            for held in self._held.values():
                places.update(getattr(held, tier))
            if places != Counter(range(total)):
                raise LedgerError(f"a {tier} block leaked or doubled")
        idle = 0
        for request, held in self._held.items():
            idle += max(0, held.promised - len(held.device))
            if held.device and held.host and held.moving is None:
                raise LedgerError(f"request {request.id} lies on both tiers")
            if request.computed > (len(held.host) or len(held.device)) * self.block_size:
                raise LedgerError(f"request {request.id} has computed more than its blocks carry")
            if held.table != tuple(held.device) or held.room != len(held.device) * self.block_size:
                raise LedgerError(f"request {request.id} has a stale block table")
        moving = Counter(dict.fromkeys(Direction, 0))
        for held in self._held.values():
            if held.moving is not None:
                moving[held.moving] += len(held.host)
        if moving != self.blocks_in_transit:
            raise LedgerError(f"{self.blocks_in_transit} blocks are counted as in transit, {dict(moving)} are")
        if idle != self.promised_idle:
            raise LedgerError(f"{self.promised_idle} promised blocks are counted as idle, {idle} are")

    def _begin(self, held: RequestBlocks, move: Move) -> Move:
        held.moving = move.direction
        self.blocks_in_transit[move.direction] += len(move.source)
        return move

    def _end(self, move: Move) -> RequestBlocks:
        held = self._held[move.request]
        if held.moving is not move.direction:
            raise LedgerError(f"request {move.request.id}: a move ended that was not in transit")
        held.moving = None
        self.blocks_in_transit[move.direction] -= len(move.source)
        return held

    def _free_device(self, held: RequestBlocks) -> None:
        self._device_free.extend(reversed(held.device))
        held.device = []
        self._refresh(held)

    def _free_host(self, held: RequestBlocks) -> None:
        self._host_free.extend(reversed(held.host))
        held.host = []

    def _set_promise(self, held: RequestBlocks, blocks: int) -> None:
        self.promised_idle -= max(0, held.promised - len(held.device))
        held.promised = blocks
        self.promised_idle += max(0, held.promised - len(held.device))

    def _refresh(self, held: RequestBlocks) -> None:
        held.table = tuple(held.device)
        held.room = len(held.device) * self.block_size
