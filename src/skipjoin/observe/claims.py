"""Claims on KV over time, folded from core events: what requests lend each other, and which of them form groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from skipjoin.core.events import Claimed
from skipjoin.core.kv.reservations import Lender
from skipjoin.core.request import Request


class _Claim(NamedTuple):
    """What a request may have. drawn: blocks of it that an account gave up."""

    lender: Lender
    blocks: int
    drawn: int


class ClaimUse:
    """Hosted requests, blocks of the reserve, and groups.

    A request is hosted while another request lends it its KV (EconoServe section 3.2). It no longer is when it ends,
    loses its KV or claims from another lender; when its host does, the host's lender takes over. Groups are the
    requests that claim at one instant with equal `Claimed.group`.

    hosted: requests that were hosted once. vacated: times that a hosted one lost its KV.
    """

    def __init__(self) -> None:
        self.hosted = 0
        self.vacated = 0
        self._claims: dict[Request, _Claim] = {}
        self._guests: dict[Request, dict[Request, None]] = {}
        self._once_hosted: set[Request] = set()  # of those that have not ended
        self._hosted_blocks = self._reserved_blocks = 0  # as of now
        self._hosted_block_s = self._reserved_block_s = 0.0
        self._group_sizes: Counter[int] = Counter()
        self._forming: Counter[Hashable] = Counter()  # groups of this instant
        self._formed_at = 0.0

    # -- told by events -----------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Nothing changed for so long."""
        self._hosted_block_s += seconds * self._hosted_blocks
        self._reserved_block_s += seconds * self._reserved_blocks

    def claimed(self, event: Claimed) -> None:
        """A claim was granted; time has passed until then."""
        request, lender = event.request, event.lender
        before = self._claims.get(request)
        drawn = event.drawn + (0 if before is None else before.drawn)
        self._set(request, _Claim(lender, event.blocks, drawn))
        if isinstance(lender, Request) and request not in self._once_hosted:
            self._once_hosted.add(request)
            self.hosted += 1
        if event.group is not None:
            self._join_group(event.group, event.now)

    def lost_kv(self, request: Request, *, blocks_left: int = 0) -> None:
        """KV of the request was dropped or moved to the host. blocks_left: that it still holds, and has of its lender;
        it claims no more."""
        claim = self._claims.get(request)
        self.vacated += claim is not None and isinstance(claim.lender, Request)
        self._end(request)
        if claim is not None and blocks_left:
            self._set(request, _Claim(claim.lender, blocks_left, 0))

    def finished(self, request: Request) -> None:
        """The request left the engine."""
        self._end(request)
        self._once_hosted.discard(request)

    def restarted(self) -> None:
        """All claims are void."""
        self._claims.clear()
        self._guests.clear()
        self._hosted_blocks = self._reserved_blocks = 0

    def close(self) -> None:
        """Forget the requests, of which nothing may be observed afterwards."""
        self.restarted()
        self._once_hosted.clear()

    # -- figures ------------------------------------------------------------------------------------------

    def kv(self, seconds: float, device_blocks: int) -> dict[str, float]:
        """Part of the record's `kv`. seconds: that passed. device_blocks: of the pool."""
        return {
            "hosted_requests": self.hosted,
            "hosted_blocks_mean": self._hosted_block_s / seconds,
            "vacated": self.vacated,
            "reserve_used_mean": self._reserved_block_s / seconds / device_blocks,
        }

    def groups(self) -> Counter[int]:
        """How many groups had so many requests."""
        return self._group_sizes + Counter(self._forming.values())

    # -- folding ------------------------------------------------------------------------------------------

    def _set(self, request: Request, claim: _Claim | None) -> None:
        """Replace the request's claim; None: it has none."""
        before = self._claims.pop(request, None)
        if before is not None:
            self._count(before, -1)
            if isinstance(before.lender, Request):
                self._guests[before.lender].pop(request)
        if claim is not None:
            self._claims[request] = claim
            self._count(claim, 1)
            if isinstance(claim.lender, Request):
                self._guests.setdefault(claim.lender, {})[request] = None

    def _count(self, claim: _Claim, sign: int) -> None:
        self._reserved_blocks += sign * claim.drawn
        if isinstance(claim.lender, Request):
            self._hosted_blocks += sign * claim.blocks
        elif claim.lender is not None:
            self._reserved_blocks += sign * claim.blocks

    def _end(self, request: Request) -> None:
        """The request's claim ends; its lender lends to its guests from now on."""
        claim = self._claims.get(request)
        lender = None if claim is None else claim.lender
        for guest in list(self._guests.get(request, ())):
            self._set(guest, self._claims[guest]._replace(lender=lender))
        self._guests.pop(request, None)
        self._set(request, None)

    def _join_group(self, group: Hashable, now: float) -> None:
        if now != self._formed_at:
            self._group_sizes.update(self._forming.values())
            self._forming.clear()
            self._formed_at = now
        self._forming[group] += 1
