from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from skipjoin.core.prefixes import Key


class _Uses(NamedTuple):
    latest: int
    before: int


_NEVER = _Uses(-1, -1)


class HeldPrefixes:
    """LRU model of the prefix-cache keys that each replica holds, fed by the dispatched requests."""

    def __init__(self) -> None:
        self.uses = 0
        self._blocks: dict[int, int] = {}
        # By replica, least recently used first.
        self._held: dict[int, OrderedDict[Key, _Uses]] = {}
        # Bit set of the replicas that hold a key.
        self._holders: dict[Key, int] = {}

    def join(self, replica: int, blocks: int) -> None:
        self._blocks[replica] = blocks
        self._held[replica] = OrderedDict()

    def leave(self, replica: int) -> None:
        for key in self._held.pop(replica):
            self._drop(key, 1 << replica)
        del self._blocks[replica]

    def find(self, keys: Sequence[Key]) -> dict[int, int]:
        """Return the number of leading keys that each replica holds, without replicas that hold none."""
        found: dict[int, int] = {}
        holders, left = self._holders, -1
        for count, key in enumerate(keys):
            here = holders.get(key, 0) & left
            if here != left:
                if count:
                    found |= dict.fromkeys(_bits(left & ~here), count)
                left = here
                if not left:
                    return found
        return found | dict.fromkeys(_bits(left), len(keys)) if keys else found

    def count_shared(self, replica: int, keys: Sequence[Key], held: int, use: int) -> int:
        """Return how many of the `held` leading keys a replica used at least twice after the use number `use`."""
        uses = self._held[replica]
        return bisect_left(keys, True, hi=held, key=lambda key: uses[key].before <= use)

    def use(self, replica: int, keys: Sequence[Key]) -> None:
        self.uses += 1
        known, now = _NEVER, _Uses(self.uses, -1)
        held, holders, bit = self._held[replica], self._holders, 1 << replica
        for key in reversed(keys):  # so that the first keys are evicted last
            uses = held.get(key, _NEVER)
            if uses is _NEVER:
                holders[key] = holders.get(key, 0) | bit
            else:
                held.move_to_end(key)
            if uses is not known:
                known, now = uses, _Uses(self.uses, uses.latest)
            held[key] = now
        self._shrink(replica)

    def extend(self, replica: int, keys: Sequence[Key], begin: int) -> None:
        held, holders, bit = self._held[replica], self._holders, 1 << replica
        if len(keys) == begin or keys[begin - 1] not in held:
            return
        latest = held[keys[begin - 1]].latest
        for key in keys[begin:]:
            if key not in held:
                holders[key] = holders.get(key, 0) | bit
                held[key] = _Uses(latest, -1)
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)
        self._shrink(replica)

    def _shrink(self, replica: int) -> None:
        held, bit = self._held[replica], 1 << replica
        while len(held) > self._blocks[replica]:
            self._drop(held.popitem(last=False)[0], bit)

    def _drop(self, key: Key, bit: int) -> None:
        if left := self._holders[key] & ~bit:
            self._holders[key] = left
        else:
            del self._holders[key]


def _bits(number: int) -> list[int]:
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]
