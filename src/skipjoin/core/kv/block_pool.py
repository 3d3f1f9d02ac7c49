from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

from skipjoin.core.prefixes import Key


class LedgerError(AssertionError): ...


class BlockPool:
    """Block pool of one memory tier.

    A *free* block holds no request's KV. A free block whose KV has a key is *cached*. Empty blocks are reused first,
    then cached ones in LRU order, then those that are leased to programs, and those that waiting requests want last.
    `changes` counts how often KV that requests wait for was lost, allocated or freed, and `reused` how often cached KV
    was lost.
    """

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.changes = self.reused = 0
        # Popped from the end, so the lowest block numbers go first.
        self._empty = list(range(total - 1, -1, -1))
        self._cached: dict[int, None] = {}
        self._leased: dict[int, None] = {}  # cached, and leased to programs
        self._wanted: dict[int, None] = {}  # cached, and wanted by waiting requests
        self._keys: dict[int, Key] = {}
        self._blocks: dict[Key, int] = {}
        self._waiting: Counter[Key] = Counter()
        self._leases: Counter[Key] = Counter()
        self._read: set[int] = set()  # being copied, and not reused since the copy began

    @property
    def cached(self) -> int:
        return len(self._cached) + len(self._leased) + len(self._wanted)

    @property
    def leased(self) -> int:
        return len(self._leased)

    @property
    def empty(self) -> int:
        return len(self._empty)

    def next_empty(self, count: int) -> list[int]:
        return [*islice(reversed(self._empty), count)]

    def take(self, count: int) -> list[int]:
        """Allocate blocks, whose old KV is lost. Check `free` first."""
        empty = self._empty
        self.free -= count
        return [empty.pop() if empty else self._take_cached() for _ in range(count)]

    def put(self, blocks: Sequence[int]) -> None:
        """Free blocks, given in token order. Of cached ones, the last is reused first."""
        self.free += len(blocks)
        if not self._keys:
            self._empty.extend(reversed(blocks))
            return
        for block in reversed(blocks):
            if (key := self._keys.get(block)) is None:
                self._empty.append(block)
            else:
                self._class_of(key)[block] = None
                self.changes += key in self._waiting

    def reclaim(self, held: Collection[int]) -> list[int]:
        lost = sorted(set(range(self.total)).difference(held, self.free_blocks()))
        for block in lost:
            if block in self._keys:
                self.unname(block)
        self._empty += lost
        self.free += len(lost)
        return lost

    # -- keys ---------------------------------------------------------------------------------------------

    def find(self, key: Key) -> int | None:
        return self._blocks.get(key)

    def find_free(self, key: Key) -> int | None:
        block = self._blocks.get(key)
        return block if block in self._cached or block in self._leased or block in self._wanted else None

    def next_cached(self, count: int) -> Iterator[tuple[int, Key]]:
        keys = self._keys
        return ((block, keys[block]) for block in islice(chain(self._cached, self._leased, self._wanted), count))

    def has_key(self, block: int) -> bool:
        return block in self._keys

    def name(self, block: int, key: Key) -> bool:
        """Assign a key to an allocated block; return False if another block has it."""
        if self._blocks.setdefault(key, block) != block:
            return False
        self._keys[block] = key
        return True

    def unname(self, block: int) -> None:
        key = self._keys.pop(block)
        del self._blocks[key]
        self._read.discard(block)
        self.changes += key in self._waiting

    def begin_read(self, blocks: Iterable[int]) -> None:
        self._read.update(blocks)

    def end_read(self, block: int) -> bool:
        """Unmark a copied block; return False if its KV was lost."""
        was_there = block in self._read
        self._read.discard(block)
        return was_there

    def revive(self, block: int) -> bool:
        if block in self._wanted:
            del self._wanted[block]
            self.changes += 1
        elif block in self._leased:
            del self._leased[block]
        elif block in self._cached:
            del self._cached[block]
        else:
            return False
        self.free -= 1
        return True

    def _class_of(self, key: Key) -> dict[int, None]:
        if key in self._waiting:
            return self._wanted
        return self._leased if key in self._leases else self._cached

    def want(self, keys: Sequence[Key]) -> None:
        # As in `put`: the KV of a request is lost from its first missing block on, so its last blocks are reused first.
        for key in reversed(keys):
            before = self._class_of(key)
            self._waiting[key] += 1
            self._move(key, before)

    def unwant(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._move(key, self._wanted)

    def lease(self, keys: Sequence[Key]) -> None:
        """Reuse free blocks with these keys, in token order, after those that no program has."""
        for key in reversed(keys):
            before = self._class_of(key)
            self._leases[key] += 1
            self._move(key, before)

    def end_lease(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self._leases[key] -= 1
            if not self._leases[key]:
                before = self._class_of(key)
                del self._leases[key]
                self._move(key, before)

    def _move(self, key: Key, before: dict[int, None]) -> None:
        after = self._class_of(key)
        if after is not before and (block := self._blocks.get(key)) in before:
            del before[block]
            after[block] = None

    def _take_cached(self) -> int:
        cached = self._cached or self._leased or self._wanted
        block = next(iter(cached))
        self.reused += 1
        del cached[block]
        self.unname(block)
        return block

    def free_blocks(self) -> Iterator[int]:
        return chain(self._empty, self._cached, self._leased, self._wanted)

    # -- consistency check --------------------------------------------------------------------------------

    def check(self, held: Iterable[int]) -> None:
        free = [*self.free_blocks()]
        if sorted(chain(free, held)) != list(range(self.total)) or len(free) != self.free:
            raise LedgerError("a block leaked or doubled")
        if self._blocks != {key: block for block, key in self._keys.items()}:
            raise LedgerError("a key leads to another block than to its own")
        if self._keys and not self._keys.keys().isdisjoint(self._empty):
            raise LedgerError("an empty block has a key")
        for cached in (self._cached, self._leased, self._wanted):
            for block in cached:
                if (key := self._keys.get(block)) is None or self._class_of(key) is not cached:
                    raise LedgerError(f"the cached block {block} has no key, or is among the wrong ones")
