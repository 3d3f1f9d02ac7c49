"""Prefix cache: full blocks that several requests share, and cached KV of requests that have left."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import islice
from math import inf

from skipjoin.core.kv.block_pool import BlockPool, Key
from skipjoin.core.kv.cpu_cache import HostCache
from skipjoin.core.kv.interface import MISS, Hit
from skipjoin.core.kv.reservation_tree import ClaimTree, LedgerError, RequestBlocks
from skipjoin.core.request import Request


class _Search:
    """Incremental prefix-cache lookup of one waiting request.

    `update` only looks up the first missing key, unless a pool reports changes. A long prefix therefore costs nothing
    in each step.

    Attributes:
        blocks: Number of hit blocks on the device.
        held: Number of those that requests hold.
        away: Number of hit blocks after them on the CPU tier.
    """

    __slots__ = ("_changes", "away", "blocks", "held", "keys")

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        self.blocks = self.held = self.away = 0
        self._changes = (-1, -1)

    def update(self, device: BlockPool, host: BlockPool, holders: Container[int]) -> Key | None:
        """Follow changes of the pools. Return the first key that neither has, or None."""
        changes = device.changes, host.changes
        if changes != self._changes:
            self._changes = changes
            self.blocks = self.held = self.away = 0
        keys, find = self.keys, device.find
        while self.blocks < len(keys) and (block := find(keys[self.blocks])) is not None:
            self.blocks += 1
            self.held += block in holders
            self.away = max(0, self.away - 1)
        while (end := self.blocks + self.away) < len(keys) and host.find_free(keys[end]) is not None:
            self.away += 1
        return keys[end] if end < len(keys) else None


class PrefixCache(ClaimTree):
    """Prefix cache of both tiers.

    Blocks with keys are full and read-only while requests hold them. The oldest holder of a shared block counts it in
    its reservation. Hits on the CPU tier are not shared: one request swaps them in, after which the CPU-tier blocks are
    free and can be found again.
    """

    def __init__(self, device_blocks: int, host_blocks: int, block_size: int, *, is_exact: bool) -> None:
        super().__init__(device_blocks)
        self.host_total = host_blocks
        self.block_size = block_size
        self._is_exact = is_exact
        self._make_pools()
        self._holders: dict[int, list[RequestBlocks]] = {}  # holders of blocks with keys
        self._awaited: dict[Request, _Search] = {}  # lookups of requests that hold nothing
        # Keys that requests are about to compute, and the leader of each.
        self._announced: dict[Request, list[Key]] = {}
        self._coming: dict[Key, Request] = {}

    # -- queries ------------------------------------------------------------------------------------------

    def hit(self, request: Request) -> Hit:
        if request.prefix is None:
            return MISS
        search = self._awaited.get(request) or _Search(list(self._usable(request)))
        missing = search.update(self._device, self._host, self._holders)
        leader = self._coming.get(missing) if missing is not None else None
        return Hit((search.blocks + search.away) * self.block_size, search.held, leader, search.away)

    @property
    def cached_blocks(self) -> int:
        return self._device.cached

    @property
    def cached_host_blocks(self) -> int:
        return self._host.cached

    def shared_within(self, requests: Iterable[Request]) -> int:
        some = {held for request in requests if (held := self._held.get(request)) is not None}
        if not any(held.shared for held in some):
            return 0
        return sum(len(holders) > 1 and some.issuperset(holders) for holders in self._holders.values())

    @property
    def shared_blocks(self) -> int:
        return sum(held.shared for held in self._held.values())

    # -- hits and registration ----------------------------------------------------------------------------

    def adopt(self, request: Request) -> Hit:
        hit = self.hit(request)
        if not hit.tokens:
            return hit
        keys = list(islice(self._usable(request), hit.tokens // self.block_size))
        there = len(keys) - hit.away
        held = self._holding(request)
        for key in keys[:there]:
            block = self._device.find(key)
            assert block is not None
            self._join(held, block)
        held.keyed = there
        for key in keys[there:]:
            block = self._host_cache.find(key)
            assert block is not None
            self._host.revive(block)
            held.host.append(block)
        self._refresh(request, held)
        return hit

    def offer(self, request: Request) -> None:
        held = self._held.get(request)
        if held is None or request.prefix is None or held.is_private:
            return
        full = min(request.computed // self.block_size, len(held.device))
        if full <= held.keyed:
            return
        keys = request.keys(full * self.block_size)
        for index in range(held.keyed, min(full, len(keys))):
            block = held.device[index]
            if not self._is_whole(block):
                full = index
                break
            if self._device.name(block, keys[index]):
                self._holders[block] = [held]
        held.keyed = full

    def _is_whole(self, block: int) -> bool:
        """Return whether one request owns all slots of the block."""
        return True

    def await_prefix(self, request: Request) -> None:
        if request.prefix is not None:
            search = self._awaited[request] = _Search(list(self._usable(request)))
            for pool in (self._device, self._host):
                pool.want(search.keys)

    def announce(self, request: Request) -> None:
        held = self._held[request]
        if request.prefix is None or request in self._announced:
            return
        keys = self._announced[request] = list(islice(self._usable(request), held.keyed, None))
        for key in keys:
            self._coming.setdefault(key, request)

    def forget_prefix(self, request: Request) -> None:
        search = self._awaited.pop(request, None)
        if search is not None:
            for pool in (self._device, self._host):
                pool.unwant(search.keys)

    def _usable(self, request: Request) -> Iterable[Key]:
        """Return the keys of blocks that the request could use. At least one known token is always computed."""
        tokens = request.known - 1
        return islice(request.keys(tokens), tokens // self.block_size)

    # -- holders ------------------------------------------------------------------------------------------

    def _join(self, held: RequestBlocks, block: int) -> None:
        """Add a holder to a block with a key."""
        held.device.append(block)
        if (holders := self._holders.get(block)) is None:
            if not self._device.revive(block):
                raise LedgerError(f"block {block} has a key, and is neither held nor cached")
            self._holders[block] = [held]
            return
        if len(holders) == 1:
            holders[0].shared += 1
        holders.append(held)
        held.adopted += 1

    def _retract(self, request: Request) -> None:
        """Unregister the request as a leader."""
        for key in self._announced.pop(request, ()):
            if self._coming.get(key) is request:
                del self._coming[key]

    def _give_back(self, held: RequestBlocks, blocks: Sequence[int]) -> None:
        """Remove the request from the holders of blocks, and free those without other holders.

        The caller resizes its reservation.
        """
        if self._holders:
            blocks = [block for block in blocks if not self._part(held, block)]
        self._device.put(blocks)

    def _part(self, held: RequestBlocks, block: int) -> bool:
        """Remove a holder of the block. Return whether others remain."""
        holders = self._holders.get(block)
        if holders is None:
            return False
        payer = holders[0]
        holders.remove(held)
        if not holders:
            del self._holders[block]
            return False
        if held is not payer:
            held.adopted -= 1
        else:
            held.shared -= 1
            heir = holders[0]
            heir.adopted -= 1
            heir.shared += 1
            heir.resize()
        if len(holders) == 1:
            holders[0].shared -= 1
        return True

    def _holding(self, request: Request) -> RequestBlocks:
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = RequestBlocks(request)
            held.join(self._root)
            if request.prefix is not None:
                self.forget_prefix(request)
                request.cached, request.led_since = 0, inf
        return held

    def _refresh(self, request: Request, held: RequestBlocks) -> None:
        """Update cached values after a change of the request's device blocks."""
        held.table = tuple(held.device)
        held.room = self._room(request, held)
        held.resize()

    def _room(self, request: Request, held: RequestBlocks) -> int:
        return min(len(held.device) * self.block_size, request.claimed)

    def _make_pools(self) -> None:
        self._device = BlockPool(self.device_total)
        self._host = BlockPool(self.host_total)
        self._host_cache = HostCache(self._device, self._host, self.block_size, is_exact=self._is_exact)

    def _forget_blocks(self) -> None:
        self._forget_claims()
        self._make_pools()
        self._holders.clear()
        self._announced.clear()
        self._coming.clear()
        for request in list(self._awaited):
            self.await_prefix(request)

    # -- consistency check --------------------------------------------------------------------------------

    def _doubly_held(self, pool: BlockPool) -> list[int]:
        """Return the pool's shared blocks, each once per holder after the first."""
        holders = self._holders if pool is self._device else {}
        return [block for block, requests in holders.items() for _ in requests[1:]]

    def _check_sharing(self) -> None:
        """Raise `LedgerError` unless blocks with keys have exactly their recorded holders and count once."""
        for pool in (self._device, self._host):
            if problem := pool.problem():
                raise LedgerError(problem)
        if not (self._holders or any(held.adopted or held.shared for held in self._held.values())):
            return  # `check` has found no block in two places
        several, seen = set(self._holders), set[int]()
        for held in self._held.values():
            several |= seen.intersection(held.device)
            seen.update(held.device)
        found: dict[int, set[RequestBlocks]] = {block: set() for block in several}
        adopted, shared = dict.fromkeys(self._held.values(), 0), dict.fromkeys(self._held.values(), 0)
        for held in self._held.values():
            for block in several.intersection(held.device):
                found[block].add(held)
        for block, requests in found.items():
            holders = self._holders.get(block, [])
            if (len(requests) > 1 or holders) and (requests != set(holders) or len(holders) != len(requests)):
                raise LedgerError(f"device block {block} is held by other requests than is known")
            for held in holders[1:]:
                adopted[held] += 1
            if len(holders) > 1:
                shared[holders[0]] += 1
        for held in self._held.values():
            if (held.adopted, held.shared) != (adopted[held], shared[held]):
                raise LedgerError("a request counts other blocks as shared than are")
