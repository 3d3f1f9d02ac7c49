from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from skipjoin.core.kv.block_pool import BlockPool, LedgerError
from skipjoin.core.kv.interface import Hit
from skipjoin.core.kv.prefix_cache import PrefixCache
from skipjoin.core.kv.request_blocks import Holders, RequestBlocks
from skipjoin.core.kv.reservations import Reservations
from skipjoin.core.kv.shared_blocks import SharedBlocks
from skipjoin.core.kv.states import StateSlots
from skipjoin.core.kv.transfers import Transfers
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.step import Direction, StateSizes


class Holdings:
    """The blocks of both tiers that each request holds, with the parts of the ledger that account for them."""

    def __init__(
        self,
        device_blocks: int,
        cpu_blocks: int,
        block_size: int,
        *,
        is_exact: bool = True,
        states: StateSizes | None = None,
    ) -> None:
        bounds = ("device_blocks", device_blocks, 1), ("cpu_blocks", cpu_blocks, 0), ("block_size", block_size, 1)
        for name, value, low in bounds:
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        self.device_total, self.block_size = device_blocks, block_size
        self._cpu_total, self._is_exact, self._states = cpu_blocks, is_exact, states
        self._compose()

    def _compose(self) -> None:
        size, held = self.block_size, dict[Request, RequestBlocks]()
        self.held = held
        self.device, self.cpu = device, cpu = BlockPool(self.device_total), BlockPool(self._cpu_total)
        self._holders = holders = Holders()
        self._transfers = transfers = Transfers(held)
        self._shared = SharedBlocks(held, device, cpu, holders, transfers, block_size=size, hold=self._hold)
        self.sharing = self._shared if self._cpu_total and self._is_exact else None
        self.states = StateSlots(self._states) if self._states is not None else None
        snapshots = self.states.snapshots if self.states is not None else None
        self.cache = PrefixCache(held, device, cpu, holders, size, is_exact=self._is_exact, snapshots=snapshots)
        self.reservations = Reservations(self.device_total)
        # Called for many requests in every step, so bind the methods of the parts directly.
        self.blocks_of: Callable[[Request], RequestBlocks | None] = held.get
        self.footprint: Callable[[Request], int] = self.reservations.footprint
        self.hit: Callable[[Request], Hit] = self.cache.hit

    @property
    def device_free(self) -> int:
        return self.device.free

    @property
    def available(self) -> int:
        return self.reservations.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def tokens_in(self, request: Request, blocks: int) -> int:
        return min(request.progress.computed, blocks * self.block_size)

    def holders(self) -> Collection[Request]:
        return self.held.keys()

    def filled(self, request: Request) -> int:
        held = self.held.get(request)
        return min(len(held.device), self.blocks_for(request.progress.computed)) if held else 0

    def has_slot(self, request: Request) -> bool:
        return self.states is None or self.states.slot_of(request) is not None or self.states.free > 0

    def grow(self, request: Request, tokens: int) -> RequestBlocks:
        held = self.held.get(request) or self._hold(request)
        missing = self.blocks_for(tokens) - len(held.device)
        if held.moving is Direction.OUT or (held.swapped_out and held.moving is None):
            raise LedgerError(f"request {request.id} grows while its KV is not on the device")
        if missing > self.device.free:
            raise LedgerError(f"request {request.id} needs {missing} blocks, {self.device.free} are free")
        if missing > 0:
            held.device += self.device.take(missing)
            held.refresh()
        return held

    def trim(self, request: Request) -> None:
        self.cut(self.held[request], self.filled(request))

    def free_cpu(self, held: RequestBlocks, blocks: int | None = None) -> None:
        self.cpu.put(held.cpu[:blocks])
        del held.cpu[:blocks]
        held.refresh_room()

    def _hold(self, request: Request) -> RequestBlocks:
        held = self.held.get(request)
        if held is None:
            if self.states is not None:
                self.states.reserve(request)
                self.states.snapshots.share(request, self.cache.found(request) * self.block_size)
            device: list[int] = []
            reservation = self.reservations.open(request, device)
            held = self.held[request] = RequestBlocks(request, self.block_size, device, reservation)
            if request.prefix is not None:
                self.cache.forget_prefix(request)
                request.progress.find(0)
        return held

    def cut(self, held: RequestBlocks, keep: int) -> None:
        reservation, request = held.reservation, held.request
        reservation.hand_over()
        reservation.promised = 0
        if request.progress.reserved_tokens != UNLIMITED:
            request.progress.reserve(0)
        gone = held.device[keep:]
        del held.device[keep:]
        held.keyed = min(held.keyed, keep)
        self._give_back(held, gone)
        held.refresh()
        if not keep and reservation.parent is not self.reservations.root:
            reservation.join(self.reservations.root)

    def _give_back(self, held: RequestBlocks, blocks: Sequence[int]) -> None:
        if self._holders.of or self._shared.of:
            remove = self._shared.remove if self._shared.of else self._holders.remove
            blocks = [block for block in blocks if not remove(block, held)]
        self.device.put(blocks)
