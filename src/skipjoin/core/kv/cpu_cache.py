from __future__ import annotations

from collections.abc import Iterable

from skipjoin.core.kv.block_pool import BlockPool
from skipjoin.core.prefixes import Key
from skipjoin.core.step import Direction, Move

# Minimum number of device blocks, of those allocated next, whose cached KV has or gets a copy on the CPU tier, and its
# ratio to the blocks that are reused between two copies. Prompts of agents reuse hundreds in a step.
_AHEAD, _AHEAD_SHARE = 256, 4
# Maximum number of blocks of one copy, if not more are reused between two, and its ratio to these, some of which are
# reused before the copy completes. The initial number.
_MOST, _COPY_SHARE, _FIRST = 64, 2, 8
# Share of the highest number of reused blocks that counts at the next copy.
_DECAY = 0.95
# Scheduling steps within which a copy should complete, because swaps queue behind it on the link. With many plans in
# flight, it is the number of steps planned before its own plan commits, plus two.
_SOON, _AFTER = 3, 2


class CpuCache:
    """Prefix cache in the free blocks of the CPU tier.

    When few device blocks are empty, the cached ones that are reused next are copied in advance, one copy at a time.
    """

    def __init__(self, device: BlockPool, cpu: BlockPool, block_size: int, *, is_exact: bool) -> None:
        self._device = device
        self._cpu = cpu
        self._block_size = block_size
        self._is_on = is_exact and cpu.total > 0
        self._most = _FIRST
        self._reused = 0  # as the device's, when the last copy could begin
        self._pace = 0.0  # recent maximum of blocks that are reused between two copies
        self._waited = 0  # scheduling steps since the copy began
        self._soon = _SOON  # number of steps within which it should complete
        self._copy: Move | None = None
        self._keys: list[Key] = []  # keys of its blocks

    @property
    def targets(self) -> tuple[int, ...]:
        return self._copy.target if self._copy is not None else ()

    def name(self, block: int, key: Key) -> None:
        if self._is_on:
            self._cpu.name(block, key)

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._cpu.has_key(block):
                self._cpu.unname(block)

    def begin(self, depth: int) -> Move | None:
        device, cpu = self._device, self._cpu
        if self._copy is not None:
            self._waited += 1
            return None
        if not self._is_on or not device.cached:
            return None
        self._pace = max(_DECAY * self._pace, device.reused - self._reused)
        self._reused = device.reused
        ahead = min(max(_AHEAD, int(_AHEAD_SHARE * self._pace)), device.total // 2)
        if device.empty >= ahead:
            return None
        # Leave most of the free blocks to requests that are swapped out.
        room = min(self._most, cpu.free // 4)
        found: list[tuple[int, Key]] = []
        for block, key in device.next_cached(ahead - device.empty):
            if len(found) == room:
                break
            if cpu.find(key) is None:
                found.append((block, key))
        if not found:
            return None
        source, self._keys = (block for block, _ in found), [key for _, key in found]
        target = cpu.take(len(found))
        self._copy = Move(Direction.OUT, None, tuple(source), tuple(target), len(found) * self._block_size)
        device.begin_read(self._copy.source)
        self._waited, self._soon = 0, max(_SOON, depth - 1 + _AFTER)
        return self._copy

    def end(self, *, is_complete: bool) -> None:
        copy, self._copy = self._copy, None
        assert copy is not None
        for block, target, key in zip(copy.source, copy.target, self._keys, strict=True):
            if self._device.end_read(block) and is_complete:
                self._cpu.name(target, key)
        self._cpu.put(copy.target)
        is_late = self._waited > self._soon or not is_complete
        self._most = (
            max(1, self._most // 2) if is_late else min(2 * self._most, max(_MOST, int(_COPY_SHARE * self._pace)))
        )
