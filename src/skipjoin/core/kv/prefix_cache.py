"""Full blocks that several requests hold, and KV that is found again after its request has gone."""

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
    """How much of the KV with these keys, from the first one on, is there.

    It is kept while its request waits, so that a long prefix costs nothing at each step: `update` looks at the first
    missing key alone, unless a pool reports changes of KV that was there.

    blocks: device blocks that are found. held: how many of them requests hold. away: blocks behind them that are found
    on the host.
    """

    __slots__ = ("_changes", "away", "blocks", "held", "keys")

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        self.blocks = self.held = self.away = 0
        self._changes = (-1, -1)

    def update(self, device: BlockPool, host: BlockPool, holders: Container[int]) -> Key | None:
        """Follow the pools. Return the first key that is on neither."""
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
    """The blocks of both tiers by the keys of their KV.

    A block with a key is full, and nothing writes to it while a request holds it. Of the requests that hold it the one
    that has for longest counts it in its claim. What is found on the host one request alone gets, which brings it back;
    its host blocks are free again, and can be found, once it is there.

    device_blocks, host_blocks: pool sizes in blocks. block_size: tokens per block. is_exact: whether KV comes back from
    the host as it went there: others use it only then.
    """

    def __init__(self, device_blocks: int, host_blocks: int, block_size: int, *, is_exact: bool) -> None:
        super().__init__(device_blocks)
        self.host_total = host_blocks
        self.block_size = block_size
        self._is_exact = is_exact
        self._make_pools()
        self._holders: dict[int, list[RequestBlocks]] = {}  # of blocks with keys
        self._awaited: dict[Request, _Search] = {}  # by requests that hold nothing
        # What requests are about to compute, and which of them does.
        self._announced: dict[Request, list[Key]] = {}
        self._coming: dict[Key, Request] = {}

    # -- questions ----------------------------------------------------------------------------------------

    def hit(self, request: Request) -> Hit:
        """What a request that holds nothing finds of its KV: full blocks from the first one on."""
        if request.prefix is None:
            return MISS
        search = self._awaited.get(request) or _Search(list(self._usable(request)))
        missing = search.update(self._device, self._host, self._holders)
        leader = self._coming.get(missing) if missing is not None else None
        return Hit((search.blocks + search.away) * self.block_size, search.held, leader, search.away)

    @property
    def cached_blocks(self) -> int:
        """Free device blocks whose KV can be found."""
        return self._device.cached

    @property
    def cached_host_blocks(self) -> int:
        """Free host blocks whose KV can be found."""
        return self._host.cached

    def shared_within(self, requests: Iterable[Request]) -> int:
        """Device blocks that these requests share with each other alone: no footprint of one has them."""
        some = {held for request in requests if (held := self._held.get(request)) is not None}
        if not any(held.shared for held in some):
            return 0
        return sum(len(holders) > 1 and some.issuperset(holders) for holders in self._holders.values())

    @property
    def shared_blocks(self) -> int:
        """Device blocks that more than one request holds."""
        return sum(held.shared for held in self._held.values())

    # -- using what is there ------------------------------------------------------------------------------

    def adopt(self, request: Request) -> Hit:
        """Let a request that holds nothing hold the blocks that `hit` tells of; returns that."""
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
        """Let others find the KV of the request's full blocks, as far as it is computed."""
        held = self._held.get(request)
        if held is None or request.prefix is None or held.is_private:
            return
        full = min(request.computed // self.block_size, len(held.device))
        if full <= held.keyed:
            return
        keys = request.prefix.keys(request, full * self.block_size)
        for index in range(held.keyed, min(full, len(keys))):
            block = held.device[index]
            if not self._is_whole(block):
                full = index
                break
            if self._device.name(block, keys[index]):
                self._holders[block] = [held]
        held.keyed = full

    def _is_whole(self, block: int) -> bool:
        """Whether all slots of the block are one request's."""
        return True

    def await_prefix(self, request: Request) -> None:
        """The request waits and holds nothing: what it could use stays for longer, until it holds something."""
        if request.prefix is not None:
            search = self._awaited[request] = _Search(list(self._usable(request)))
            for pool in (self._device, self._host):
                pool.want(search.keys)

    def announce(self, request: Request) -> None:
        """The request is about to compute what it knows and does not hold: it leads those that can use it."""
        held = self._held[request]
        if request.prefix is None or request in self._announced:
            return
        keys = self._announced[request] = list(islice(self._usable(request), held.keyed, None))
        for key in keys:
            self._coming.setdefault(key, request)

    def forget_prefix(self, request: Request) -> None:
        """It waits no longer; no effect if it did not."""
        search = self._awaited.pop(request, None)
        if search is not None:
            for pool in (self._device, self._host):
                pool.unwant(search.keys)

    def _usable(self, request: Request) -> Iterable[Key]:
        """The keys of blocks that the request could use: at least one known token is always computed."""
        assert request.prefix is not None
        tokens = request.known - 1
        return islice(request.prefix.keys(request, tokens), tokens // self.block_size)

    # -- holding ------------------------------------------------------------------------------------------

    def _join(self, held: RequestBlocks, block: int) -> None:
        """Let one more request hold a block with a key."""
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
        """The request computes no more."""
        for key in self._announced.pop(request, ()):
            if self._coming.get(key) is request:
                del self._coming[key]

    def _give_back(self, held: RequestBlocks, blocks: Sequence[int]) -> None:
        """The request holds these blocks no more; those that others hold stay with them. The caller resizes its
        claim."""
        if self._holders:
            blocks = [block for block in blocks if not self._part(held, block)]
        self._device.put(blocks)

    def _part(self, held: RequestBlocks, block: int) -> bool:
        """Take the block from one of the requests that hold it. Returns whether others still do."""
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
        """Follow a change of its device blocks."""
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
        """Begin again with nothing on either tier."""
        self._forget_claims()
        self._make_pools()
        self._holders.clear()
        self._announced.clear()
        self._coming.clear()
        for request in list(self._awaited):
            self.await_prefix(request)

    # -- the proof ----------------------------------------------------------------------------------------

    def _doubly_held(self, pool: BlockPool) -> list[int]:
        """The blocks of the pool that several requests hold, once for each but the first."""
        holders = self._holders if pool is self._device else {}
        return [block for block, requests in holders.items() for _ in requests[1:]]

    def _check_sharing(self) -> None:
        """Raise `LedgerError` unless each block with a key is held by those that are known to hold it, and counted in
        one claim."""
        for pool in (self._device, self._host):
            if problem := pool.problem():
                raise LedgerError(problem)
        if not (self._holders or any(held.adopted or held.shared for held in self._held.values())):
            return  # no block is in two places, as `check` has found
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
