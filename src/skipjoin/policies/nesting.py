from __future__ import annotations

import math
from bisect import bisect_left, insort
from operator import itemgetter

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.policies.econo import Phase, phase_of


class ParentRequests:
    """Finds parent requests, whose unused reserved KV can hold another request until it finishes (KVC pipelining).

    The growth of the parent request until then must fit as well. The one with the fewest unused blocks is chosen.
    """

    def __init__(self, buffer: float) -> None:
        self._buffer = buffer
        # Unused blocks of limited reservations, ascending. They shrink as requests grow, which is corrected when read.
        self._unused: list[tuple[int, int, Request]] = []
        # Number of holders and of available blocks at that time, or -1 if some may have more unused blocks since.
        self._holders, self._available = -1, 0

    def begin(self, kv: KVAccounts) -> None:
        if self._holders != len(kv.holders()):
            self.changed()

    def changed(self) -> None:
        """Note that some requests may have more unused blocks."""
        self._holders = -1

    def need(self, blocks: int, steps: int, kv: KVAccounts) -> int:
        return blocks + kv.blocks_for(math.ceil(steps * (1 + self._buffer)))

    def seek(self, request: Request, need: int, kv: KVAccounts) -> Request | None:
        self._determine(kv)
        if not self._unused or need > self._unused[-1][0]:
            return None
        place = self._place(need)
        while place < len(self._unused):
            parent = self._unused[place][2]
            if not self._is_current(place, kv):
                place = self._place(need)
            elif _can_be_parent(parent) and not self._is_above(request, parent, kv):
                return parent
            else:
                place += 1
        return None

    def largest(self, kv: KVAccounts) -> int:
        """Return the largest need that a parent request can hold, 0 if none can hold a block and grow."""
        self._determine(kv)
        place = len(self._unused) - 1
        while place >= 0:
            if not self._is_current(place, kv):
                place = len(self._unused) - 1
            elif _can_be_parent(self._unused[place][2]):
                return self._unused[place][0]
            else:
                place -= 1
        return 0

    def _determine(self, kv: KVAccounts) -> None:
        if self._holders < 0 or self._available != kv.available:
            self._holders, self._available = len(kv.holders()), kv.available
            found = kv.reservations.with_unused(2) if kv.reservations is not None else ()
            self._unused = sorted([entry for entry in found if entry[2].progress.reserved_tokens != UNLIMITED])

    def _place(self, need: int) -> int:
        return bisect_left(self._unused, need, key=itemgetter(0))

    def _is_current(self, place: int, kv: KVAccounts) -> bool:
        blocks, number, parent = self._unused[place]
        if (now := unused(parent, kv)) >= blocks:
            return True
        del self._unused[place]
        if now > 1:
            insort(self._unused, (now, number, parent))
        return False

    @staticmethod
    def _is_above(request: Request, parent: Request, kv: KVAccounts) -> bool:
        outer: Owner = parent
        while isinstance(outer, Request):
            if outer is request:
                return True
            outer = parent_of(outer, kv)
        return False


def _can_be_parent(request: Request) -> bool:
    return request.progress.finish_reason is None and phase_of(request, request.progress.known) is Phase.RUNNING


def unused(owner: Request | Account, kv: KVAccounts) -> int:
    """Return the number of reserved blocks of `owner` that neither it nor nested requests use."""
    return kv.reservations.unused(owner) if kv.reservations is not None else 0


def parent_of(request: Request, kv: KVAccounts) -> Owner:
    return kv.reservations.parent_of(request) if kv.reservations is not None else None
