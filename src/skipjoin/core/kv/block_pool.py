"""`BlockPool`: the blocks of one tier, and the KV in them that others may find by its key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

# Names the content of a full block and of all that comes before it.
Key = bytes


class BlockPool:
    """The blocks of one tier, by number. A block that holds no request's KV is *free*.

    KV can have a *key*. A free block whose KV has one is *cached*: the KV stays until the block is handed out again,
    which happens once no other block is free. Of cached blocks those go first that no request waits for, the longest
    cached first. Blocks without a key are handed out in a fixed order, so that a trace repeats exactly.

    total: blocks of the tier. changes: how often KV that requests wait for was lost, taken or given back.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.changes = 0
        # Popped from the end, so the lowest block numbers go first.
        self._empty = list(range(total - 1, -1, -1))
        self._cached: dict[int, None] = {}
        self._wanted: dict[int, None] = {}  # cached, and requests wait for its key
        self._keys: dict[int, Key] = {}
        self._blocks: dict[Key, int] = {}
        self._waiting: Counter[Key] = Counter()
        self._read: set[int] = set()  # their KV is being copied, and is still there

    @property
    def free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._empty) + len(self._cached) + len(self._wanted)

    @property
    def cached(self) -> int:
        """Free blocks whose KV can be found."""
        return len(self._cached) + len(self._wanted)

    @property
    def empty(self) -> int:
        """Free blocks whose KV, if they have any, cannot be found."""
        return len(self._empty)

    def take(self, count: int) -> list[int]:
        """Hand out blocks; what KV they hold is lost. Ask `free` first."""
        empty = self._empty
        return [empty.pop() if empty else self._take_cached() for _ in range(count)]

    def put(self, blocks: Sequence[int]) -> None:
        """Take back blocks of a request, in the order of its tokens: the first ones are handed out first, and cached
        ones last."""
        if not self._keys:
            self._empty.extend(reversed(blocks))
            return
        for block in reversed(blocks):
            if (key := self._keys.get(block)) is None:
                self._empty.append(block)
            elif key in self._waiting:
                self._wanted[block] = None
                self.changes += 1
            else:
                self._cached[block] = None

    def recover(self, held: Collection[int]) -> list[int]:
        """Free the blocks that are neither free nor among `held`, which no account knows any more; what KV they hold is
        lost."""
        lost = sorted(set(range(self.total)).difference(held, self.free_blocks()))
        for block in lost:
            if block in self._keys:
                self.unname(block)
        self._empty += lost
        return lost

    # -- keys ---------------------------------------------------------------------------------------------

    def find(self, key: Key) -> int | None:
        """The block with this KV."""
        return self._blocks.get(key)

    def find_free(self, key: Key) -> int | None:
        """The block with this KV, if it is cached."""
        block = self._blocks.get(key)
        return block if block in self._cached or block in self._wanted else None

    def next_cached(self, count: int) -> Iterator[tuple[int, Key]]:
        """The cached blocks that are handed out next, in that order, and the keys of their KV."""
        keys = self._keys
        return ((block, keys[block]) for block in islice(chain(self._cached, self._wanted), count))

    def has_key(self, block: int) -> bool:
        """Whether the KV of the block can be found."""
        return block in self._keys

    def name(self, block: int, key: Key) -> bool:
        """Let the KV of a block that is handed out be found; False: another block has the same."""
        if self._blocks.setdefault(key, block) != block:
            return False
        self._keys[block] = key
        return True

    def unname(self, block: int) -> None:
        """Let the KV of a block that is handed out be found no more."""
        key = self._keys.pop(block)
        del self._blocks[key]
        self._read.discard(block)
        self.changes += key in self._waiting

    def begin_read(self, blocks: Iterable[int]) -> None:
        """The KV of these blocks, which have keys, is being copied elsewhere."""
        self._read.update(blocks)

    def end_read(self, block: int) -> bool:
        """It is copied. False: the block was handed out meanwhile, or lost its key, and the copy may be of anything."""
        was_there = block in self._read
        self._read.discard(block)
        return was_there

    def revive(self, block: int) -> bool:
        """Hand out a cached block for the KV that it holds; False: it is handed out already."""
        if block in self._wanted:
            del self._wanted[block]
            self.changes += 1
            return True
        return self._cached.pop(block, False) is None

    def want(self, keys: Iterable[Key]) -> None:
        """A request begins to wait for this KV: its blocks stay cached longer."""
        for key in keys:
            self._waiting[key] += 1
            self._move(key, self._cached, self._wanted)

    def unwant(self, keys: Iterable[Key]) -> None:
        """A request waits for it no longer."""
        for key in keys:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._move(key, self._wanted, self._cached)

    def _move(self, key: Key, source: dict[int, None], target: dict[int, None]) -> None:
        if (block := self._blocks.get(key)) in source:
            del source[block]
            target[block] = None

    def _take_cached(self) -> int:
        cached = self._cached or self._wanted
        block = next(iter(cached))
        del cached[block]
        self.unname(block)
        return block

    # -- the proof ----------------------------------------------------------------------------------------

    def free_blocks(self) -> Iterator[int]:
        """Every free block."""
        return chain(self._empty, self._cached, self._wanted)

    def problem(self) -> str:
        """What is wrong with the keys, in words; empty: nothing."""
        if self._blocks != {key: block for block, key in self._keys.items()}:
            return "a key leads to another block than to its own"
        if self._keys and not self._keys.keys().isdisjoint(self._empty):
            return "an empty block has a key"
        if not all(self._is_sorted(block, wanted) for wanted, cached in self._tiers() for block in cached):
            return "a cached block has no key, or is among the wrong ones"
        return ""

    def _tiers(self) -> tuple[tuple[bool, dict[int, None]], ...]:
        return (False, self._cached), (True, self._wanted)

    def _is_sorted(self, block: int, wanted: bool) -> bool:
        key = self._keys.get(block)
        return key is not None and (key in self._waiting) == wanted
