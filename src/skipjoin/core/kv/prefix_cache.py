from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from skipjoin.core.kv.block_pool import BlockPool, LedgerError
from skipjoin.core.kv.cpu_cache import CpuCache
from skipjoin.core.kv.interface import MISS, Hit
from skipjoin.core.kv.request_blocks import Holders, RequestBlocks
from skipjoin.core.kv.states import Snapshots
from skipjoin.core.prefixes import Key
from skipjoin.core.request import ProgramId, Request
from skipjoin.core.step import Move

# Ends of replaced leases that may always be kept.
_FEW_ENDS = 64
# Weight of the latest dropped request in what dropped requests find again: about the last 15 count.
_SURVIVAL_RATE = 1 / 16
# Most waiting requests whose common prefix with a request that is admitted is looked for.
_FOLLOWERS = 64


class _Lease(NamedTuple):
    keys: Sequence[Key]
    until: float


def _common(one: Sequence[Key], other: Sequence[Key]) -> int:
    """Return how many first keys are equal; each stands for all tokens before it."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda index: one[index] != other[index])


class _Search:
    """Lookup of one waiting request, which only tries the first missing key unless a pool reports changes."""

    __slots__ = ("_changes", "_snapshots", "blocks", "held", "keys", "swapped_out")

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        self.blocks = self.held = self.swapped_out = 0
        self._changes = (-1, -1)
        self._snapshots = (-1, -1, 0)  # of the last call of `with_state`: blocks found, changes, result

    @property
    def found(self) -> int:
        return self.blocks + self.swapped_out

    def with_state(self, snapshots: Snapshots) -> int:
        """Return the number of hit blocks after which there is a snapshot of the state."""
        found, changes = self.found, snapshots.changes
        if self._snapshots[:2] != (found, changes):
            self._snapshots = (found, changes, snapshots.longest(self.keys, found))
        return self._snapshots[2]

    def update(self, device: BlockPool, cpu: BlockPool, holders: Container[int]) -> Key | None:
        changes = device.changes, cpu.changes
        if changes != self._changes:
            self._changes = changes
            self.blocks = self.held = self.swapped_out = 0
        keys, find = self.keys, device.find
        while self.blocks < len(keys) and (block := find(keys[self.blocks])) is not None:
            self.blocks += 1
            self.held += block in holders
            self.swapped_out = max(0, self.swapped_out - 1)
        while (end := self.blocks + self.swapped_out) < len(keys) and cpu.find_free(keys[end]) is not None:
            self.swapped_out += 1
        return keys[end] if end < len(keys) else None


class PrefixCache:
    """Prefix cache of both tiers.

    Blocks with keys are full and read-only while requests hold them. Hits on the CPU tier are not shared: one request
    swaps them in. For a model with state, a hit ends where there is a snapshot, and a request waits for one.
    """

    def __init__(
        self,
        requests: Mapping[Request, RequestBlocks],
        device: BlockPool,
        cpu: BlockPool,
        holders: Holders,
        block_size: int,
        *,
        is_exact: bool,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._snapshots = snapshots
        self.cpu = CpuCache(device, cpu, block_size, is_exact=is_exact)
        self.awaited: dict[Request, _Search] = {}
        self._requests = requests
        self._pools = device, cpu
        self._holders = holders
        self._block_size = block_size
        # Keys that requests are about to compute, and the leader of each.
        self._announced: dict[Request, list[Key]] = {}
        self._coming: dict[Key, Request] = {}
        self._leases: dict[ProgramId, _Lease] = {}  # in the order in which they began
        self._leased = 0  # number of keys in leases
        self._ends: list[tuple[float, ProgramId]] = []  # heap, with entries of leases that were replaced
        # Free blocks and blocks of others that a request found when its KV was dropped.
        self._dropped: dict[Request, tuple[int, int]] = {}
        self._left = self._found = 0.0  # moving means of free blocks with KV at the drop, and of those found again

    def hit(self, request: Request) -> Hit:
        if request.prefix is None:
            return MISS
        search = self.awaited.get(request) or _Search(list(self._usable(request)))
        missing = search.update(*self._pools, self._holders.of)
        leader = self._coming.get(missing) if missing is not None else None
        if (snapshots := self._snapshots) is not None:
            return self._hit_with_state(search, snapshots, search.with_state(snapshots), leader)
        return Hit((search.blocks + search.swapped_out) * self._block_size, search.held, leader, search.swapped_out)

    def _hit_with_state(self, search: _Search, snapshots: Snapshots, blocks: int, leader: Request | None) -> Hit:
        here, size = min(blocks, search.blocks), self._block_size
        held = sum(block in self._holders.of for block in map(self._pools[0].find, search.keys[:here]))
        if leader is not None:
            common = _common(search.keys, leader.keys(leader.progress.known)) * size
            if not any(blocks * size < border <= common for border in snapshots.borders_of(leader)):
                leader = None
        return Hit(blocks * size, held, leader, blocks - here)

    def _share_border(self, leader: Request, keys: Sequence[Key]) -> None:
        """Let the leader leave a snapshot where its keys and these part, if it has not passed that."""
        border = _common(keys, leader.keys(leader.progress.known)) * self._block_size
        if self._snapshots is not None and border > leader.progress.planned:
            self._snapshots.share(leader, border)

    @property
    def survival(self) -> float:
        """Share of free blocks with KV that requests found when they returned after their KV was dropped."""
        return self._found / self._left if self._left else 0.0

    def note_drop(self, request: Request) -> None:
        """Remember what a dropped request could find, to learn how much of it is left when it returns."""
        if (search := self.awaited.get(request)) is not None:
            search.update(*self._pools, self._holders.of)
            if search.found > search.held:
                self._dropped[request] = search.found - search.held, search.held

    def _note_return(self, request: Request) -> None:
        if (dropped := self._dropped.pop(request, None)) is not None:
            left, shared = dropped
            held = self._requests[request]
            self._left += _SURVIVAL_RATE * (left - self._left)
            self._found += _SURVIVAL_RATE * (min(left, max(0, held.keyed + len(held.cpu) - shared)) - self._found)

    def found(self, request: Request) -> int:
        """Return how many cached blocks a waiting request's last search found, whether or not it may use them."""
        search = self.awaited.get(request)
        return search.found if search is not None else 0

    @property
    def leased_blocks(self) -> int:
        return self._pools[0].leased

    @property
    def cached_blocks(self) -> int:
        return self._pools[0].cached

    @property
    def cached_cpu_blocks(self) -> int:
        return self._pools[1].cached

    @property
    def shared_blocks(self) -> int:
        return sum(held.reservation.shared for held in self._requests.values())

    def shared_within(self, requests: Iterable[Request]) -> int:
        return self._holders.within({held for request in requests if (held := self._requests.get(request)) is not None})

    def adopt(self, held: RequestBlocks, hit: Hit) -> None:
        device, cpu = self._pools
        keys = list(islice(self._usable(held.request), hit.tokens // self._block_size))
        held.keyed = len(keys) - hit.swapped_out
        for key in keys[: held.keyed]:
            block = device.find(key)
            assert block is not None
            if block not in self._holders.of and not device.revive(block):
                raise LedgerError(f"block {block} has a key, and is neither held nor cached")
            held.device.append(block)
            self._holders.add(block, held)
        for key in keys[held.keyed :]:
            block = cpu.find_free(key)
            assert block is not None
            cpu.revive(block)
            held.cpu.append(block)
        held.refresh()

    def offer(self, request: Request) -> None:
        held = self._requests.get(request)
        if held is None or request.prefix is None or held.is_private:
            return
        full = min(request.progress.computed // self._block_size, len(held.device))
        if full <= held.keyed:
            return
        keys = request.keys(full * self._block_size)
        for index in range(held.keyed, min(full, len(keys))):
            if index in held.sharing.owned or index in held.sharing.borrowed:
                full = index  # another request owns some of its slots
                break
            block = held.device[index]
            if self._pools[0].name(block, keys[index]):
                self._holders.add(block, held)
        held.keyed = full

    def offer_swapped(self, held: RequestBlocks, move: Move) -> None:
        request = held.request
        if request.prefix is None or held.is_private or not held.cpu or held.cpu[0] != move.target[0]:
            return
        keys = request.keys(request.progress.computed)[len(held.device) : request.progress.computed // self._block_size]
        for block, key in zip(move.target, keys, strict=False):
            self.cpu.name(block, key)

    def await_prefix(self, request: Request) -> None:
        if request.prefix is not None:
            search = self.awaited[request] = _Search(list(self._usable(request)))
            for pool in self._pools:
                pool.want(search.keys)
            for leader in self._announced if self._snapshots is not None else ():
                self._share_border(leader, search.keys)

    def forget_prefix(self, request: Request) -> None:
        search = self.awaited.pop(request, None)
        if request.progress.finish_reason is not None:
            self._dropped.pop(request, None)
        if search is not None:
            for pool in self._pools:
                pool.unwant(search.keys)

    def lease(self, program: ProgramId, request: Request, until: float) -> None:
        self._end_lease(program)
        size = self._block_size
        keys = list(request.keys(request.progress.computed)[: request.progress.computed // size])
        if keys:
            for pool in self._pools:
                pool.lease(keys)
            self._leases[program] = _Lease(keys, until)
            self._leased += len(keys)
            heapq.heappush(self._ends, (until, program))
        # More cannot all be cached.
        while self._leased > sum(pool.total for pool in self._pools):
            self._end_lease(next(iter(self._leases)))
        if len(self._ends) > 2 * len(self._leases) + _FEW_ENDS:
            self._ends = [(lease.until, name) for name, lease in self._leases.items()]
            heapq.heapify(self._ends)

    def end_leases(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, program = heapq.heappop(self._ends)
            if (lease := self._leases.get(program)) is not None and lease.until == until:
                self._end_lease(program)

    def _end_lease(self, program: ProgramId) -> None:
        if (lease := self._leases.pop(program, None)) is not None:
            self._leased -= len(lease.keys)
            for pool in self._pools:
                pool.end_lease(lease.keys)

    def announce(self, request: Request) -> None:
        if request.prefix is None or request in self._announced:
            return
        self._note_return(request)
        keys = self._announced[request] = list(islice(self._usable(request), self._requests[request].keyed, None))
        for key in keys:
            self._coming.setdefault(key, request)
        for search in islice(self.awaited.values(), _FOLLOWERS if self._snapshots is not None else 0):
            self._share_border(request, search.keys)

    def retract(self, request: Request) -> None:
        for key in self._announced.pop(request, ()):
            if self._coming.get(key) is request:
                del self._coming[key]

    def check(self) -> None:
        if not self.awaited.keys().isdisjoint(self._requests):
            raise LedgerError("a request holds blocks and still waits for cached ones")
        for key, leader in self._coming.items():
            if leader not in self._requests or key not in self._announced.get(leader, ()):
                raise LedgerError(f"request {leader.id} leads a key that it does not compute")

    def _usable(self, request: Request) -> Iterable[Key]:
        """Return the keys of blocks that it could use, without its last known token."""
        tokens = request.progress.known - 1
        return islice(request.keys(tokens), tokens // self._block_size)
