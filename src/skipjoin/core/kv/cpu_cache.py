"""KV that others may find on the host, and how it gets there."""

from __future__ import annotations

from collections.abc import Iterable

from skipjoin.core.kv.block_pool import BlockPool, Key
from skipjoin.core.step import Direction, Move

# Cached device blocks that have a copy on the host, or get one, before they are handed out.
_AHEAD = 256
# Blocks of one copy, at most and at first.
_MOST, _FIRST = 64, 8
# Decisions within which a copy should land: moves of requests wait behind it on the link. With many plans in flight,
# those that are decided before its own plan commits, and two.
_SOON, _AFTER = 3, 2


class HostCache:
    """The host's free blocks by the keys of their KV, and what copies KV there.

    Cached blocks of the device are copied ahead of need, those first that are handed out next, once few other blocks
    are free. They stay where they are meanwhile and afterwards: nothing waits for a copy. One whose block is handed out
    before it has landed is worth nothing. There is one copy at a time, as large as the link carries within a few steps.

    block_size: tokens per block. is_exact: whether KV comes back from the host as it went there; otherwise nothing is
    cached.
    """

    def __init__(self, device: BlockPool, host: BlockPool, block_size: int, *, is_exact: bool) -> None:
        self._device = device
        self._host = host
        self._block_size = block_size
        self._is_on = is_exact and host.total > 0
        self._ahead = min(_AHEAD, device.total // 2)
        self._most = _FIRST
        self._waited = 0  # decisions since the copy began
        self._soon = _SOON  # within how many it should land
        self._copy: Move | None = None
        self._keys: list[Key] = []  # of its blocks

    @property
    def targets(self) -> tuple[int, ...]:
        """The host blocks to which KV is being copied: they are neither free nor held."""
        return self._copy.target if self._copy is not None else ()

    def find(self, key: Key) -> int | None:
        """The free host block with this KV."""
        return self._host.find_free(key)

    def name(self, block: int, key: Key) -> None:
        """Let the KV in a host block that a request holds be found when that is free."""
        if self._is_on:
            self._host.name(block, key)

    def forget(self, blocks: Iterable[int]) -> None:
        """What these host blocks have is not what their keys say."""
        for block in blocks:
            if self._host.has_key(block):
                self._host.unname(block)

    def begin(self, depth: int) -> Move | None:
        """Begin to copy what the device is about to lose; None: nothing, or a copy is under way. depth: plans that may
        be in flight at once."""
        device, host = self._device, self._host
        if self._copy is not None:
            self._waited += 1
            return None
        if not self._is_on or not device.cached or device.empty >= self._ahead:
            return None
        # Most of the free host blocks stay for requests that are swapped.
        room = min(self._most, host.free // 4)
        found: list[tuple[int, Key]] = []
        for block, key in device.next_cached(self._ahead - device.empty):
            if len(found) == room:
                break
            if host.find(key) is None:
                found.append((block, key))
        if not found:
            return None
        source, self._keys = (block for block, _ in found), [key for _, key in found]
        target = host.take(len(found))
        self._copy = Move(Direction.OUT, None, tuple(source), tuple(target), len(found) * self._block_size)
        device.begin_read(self._copy.source)
        self._waited, self._soon = 0, max(_SOON, depth - 1 + _AFTER)
        return self._copy

    def end(self, *, has_landed: bool) -> None:
        """The copy has ended, well or badly."""
        copy, self._copy = self._copy, None
        assert copy is not None
        for block, target, key in zip(copy.source, copy.target, self._keys, strict=True):
            if self._device.end_read(block) and has_landed:
                self._host.name(target, key)
        self._host.put(copy.target)
        is_late = self._waited > self._soon or not has_landed
        self._most = max(1, self._most // 2) if is_late else min(2 * self._most, _MOST)
