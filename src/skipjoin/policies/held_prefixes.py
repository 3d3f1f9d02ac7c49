"""Which replicas probably hold the KV of which prompts, by the requests that they got."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from skipjoin.core.kv.block_pool import Key


class _Uses(NamedTuple):
    """The numbers of a key's latest two uses on a replica; -1: there was none."""

    latest: int
    before: int


_NEVER = _Uses(-1, -1)


class HeldPrefixes:
    """The keys of KV that each replica probably holds: those of the requests that it got, but for the ones that it used
    longest ago, as many as it has no blocks for. No replica is asked.

    uses: how many requests went to replicas so far; each is a use of its keys.
    """

    def __init__(self) -> None:
        self.uses = 0
        self._blocks: dict[int, int] = {}
        # Of each replica, those that it used longest ago first.
        self._held: dict[int, OrderedDict[Key, _Uses]] = {}
        # The replicas that hold a key, as bits.
        self._holders: dict[Key, int] = {}

    def join(self, replica: int, blocks: int) -> None:
        """A replica begins. It holds nothing yet, and `blocks` blocks at most."""
        self._blocks[replica] = blocks
        self._held[replica] = OrderedDict()

    def leave(self, replica: int) -> None:
        """A replica has ended, and its KV with it."""
        for key in self._held.pop(replica):
            self._drop(key, 1 << replica)
        del self._blocks[replica]

    def find(self, keys: Sequence[Key]) -> dict[int, int]:
        """How many of these keys, from the first one on, each replica holds; without replicas that hold none."""
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
        """How many of these keys, from the first one on, a replica used twice at least after the use of this number.
        held: how many it holds; it used each of them whenever it used a later one."""
        uses = self._held[replica]
        return bisect_left(keys, True, hi=held, key=lambda key: uses[key].before <= use)

    def use(self, replica: int, keys: Sequence[Key]) -> None:
        """A replica gets a request with these keys."""
        self.uses += 1
        known, now = _NEVER, _Uses(self.uses, -1)
        held, holders, bit = self._held[replica], self._holders, 1 << replica
        for key in reversed(keys):  # the first ones are kept for longest
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
        """A request of a replica has ended. keys: its own. begin: how many it had when it came, at least 1; if the
        replica does not hold the last of those any more, the others are of no use."""
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
    """The numbers of the bits that are set."""
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]
