"""Exact claims on KV, and claims that are lent what others have claimed and do not use yet (EconoServe sections 3.2 and
3.3)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from operator import itemgetter

from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.reservations import Account, Lender
from skipjoin.core.policy import Callbacks, Grant, Wait
from skipjoin.core.request import UNLIMITED, Band, Request
from skipjoin.policies.econo import PaddedLengths, Phase, phase_of

# What prompts claim their KV from while generations have the rest of the pool.
PROMPTS = Account("prompts")
# Hosts that are looked at for one guest: others that were hosted in the same step may have taken the first.
_MOST_HOSTS = 8


class Hosts:
    """Finds requests whose claimed KV lies idle for long enough to hold another request from its first block to its
    last (KVC pipelining, EconoServe section 3.2).

    A host with `unused` blocks takes a guest that needs `blocks` of them for `steps` steps if what the host itself
    grows by in that time still fits. Guests may be hosts in turn. Of all hosts that do, the one with the least unused
    blocks is taken.

    buffer: share of a guest's steps by which it may be late.
    """

    def __init__(self, buffer: float) -> None:
        if not buffer >= 0:
            raise ValueError(f"buffer must be at least 0, got {buffer}")
        self._buffer = buffer
        self._unused: list[tuple[int, int, Request]] | None = None

    def begin(self) -> None:
        """A step begins: what hosts have unused is looked at again, when the first guest asks."""
        self._unused = None

    def need(self, blocks: int, steps: int, kv: KVAccounts) -> int:
        """The unused blocks that a host must have."""
        return blocks + kv.blocks_for(math.ceil(steps * (1 + self._buffer)))

    def seek(self, guest: Request, need: int, kv: KVAccounts) -> Request | None:
        """A host for the guest, if there is one."""
        if self._unused is None:
            self._unused = self._sorted(kv)
        found = self._unused
        if not found or found[-1][0] < need:
            return None
        place = bisect_left(found, need, key=itemgetter(0))
        for _, _, host in found[place : place + _MOST_HOSTS]:
            if kv.unused(host) >= need and not self._lends_to(guest, host, kv):
                return host
        return None

    def has_room(self, kv: KVAccounts) -> bool:
        """Whether any host has a block for a guest, and one to grow into beside it."""
        if self._unused is None:
            self._unused = self._sorted(kv)
        return bool(self._unused)

    def _sorted(self, kv: KVAccounts) -> list[tuple[int, int, Request]]:
        """The hosts by their unused blocks, least first."""
        found = []
        for request in kv.holders():
            if request.claimed != UNLIMITED and phase_of(request, request.known) is Phase.RUNNING:
                unused = kv.unused(request)
                if unused > 1 and request.finish_reason is None:
                    found.append((unused, request.id, request))
        found.sort()
        return found

    @staticmethod
    def _lends_to(guest: Request, host: Request, kv: KVAccounts) -> bool:
        """Whether the guest itself lends the host its claim."""
        lender: Lender = host
        while isinstance(lender, Request):
            if lender is guest:
                return True
            lender = kv.lender_of(lender)
        return False


class ExactClaims(Callbacks):
    """A generation claims the KV that `lengths` has it need until its end, and no more. A prompt claims what it needs
    itself, out of a reserve, and becomes a generation that waits for its claim (EconoServe section 3.3).

    Prompts go beyond the reserve only while no generation waits. Where a host has room, a request is lent all that it
    needs, prompt and output, and waits no more. A request that outgrows its claim gets more out of its lender's unused
    blocks, what is available or the reserve, in this order; if none has enough it pauses where it is and waits for
    another claim (offload-free preemption). Others lose KV for a claim only where nothing runs, or where they have a
    worse priority.

    lengths: of outputs. group: of a generation that waits. reserve: the share of the pool that prompts have. hosts:
    None: no KV is lent. overdue_s: while a request that has been here for so many seconds gets no KV for its prompt, no
    other gets any for its own: a prompt that is larger than the reserve would wait for ever behind generations.
    """

    rests = True

    def __init__(
        self,
        lengths: PaddedLengths,
        *,
        group: Callable[[Request, float], Hashable] | None,
        reserve: float,
        hosts: Hosts | None,
        overdue_s: float = math.inf,
    ) -> None:
        if not 0 <= reserve < 1:
            raise ValueError(f"reserve must be in [0, 1), got {reserve}")
        self._lengths = lengths
        self._group = group
        self._reserve = reserve
        self._hosts = hosts
        self._overdue_s = overdue_s
        self._now = 0.0
        self._bands: Counter[Band] = Counter()  # of all requests
        # By request: its forecast and its known tokens, and what follows from them; see `_whole`.
        self._wholes: dict[Request, tuple[Forecast | None, int, tuple[int, int, int]]] = {}

    def begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        self._now = now
        if self._hosts is not None:
            self._hosts.begin()
        return ((PROMPTS, math.ceil(self._reserve * kv.device_total)),)

    def arrived(self, request: Request, now: float) -> None:
        self._bands[request.band] += 1

    def finished(self, request: Request, now: float) -> None:
        self._wholes.pop(request, None)
        band = request.band
        self._bands[band] -= 1
        if not self._bands[band]:
            del self._bands[band]

    def claim(self, request: Request, target: int, kv: KVAccounts) -> Grant | Wait:
        if not kv.holds(request):
            return self._first_claim(request, kv)
        generated = max(0, target - len(request.prompt))
        if self._has_outgrown(request, kv) and (more := self._more(request, target, kv)) is not None:
            return more
        tokens = self._lengths.kv_tokens(request, generated)
        blocks = kv.blocks_for(tokens)
        group = None if self._group is None else self._group(request, self._now)
        if kv.shortfall_of_claim(request, blocks, None) <= 0:
            return Grant(now=blocks, blocks=blocks, tokens=tokens, group=group)
        if self._hosts is not None:
            lent = self._lengths.kv_tokens(request, generated, guest=True)
            need = self._hosts.need(kv.blocks_for(lent), lent - target + 1, kv)
            if (host := self._hosts.seek(request, need, kv)) is not None:
                blocks = kv.blocks_for(lent)
                return Grant(now=blocks, blocks=blocks, tokens=lent, lender=host, group=group)
        if self._is_stuck(request, kv) or self._may_displace(request, kv):
            return Grant(now=blocks, blocks=blocks, tokens=tokens, draws=PROMPTS, group=group)
        return Wait.PASS

    def _first_claim(self, request: Request, kv: KVAccounts) -> Grant | Wait:
        """A claim for a request without KV, for its prompt or, with a host, for all of it."""
        known = request.known
        if self._hosts is not None:
            tokens, blocks, need = self._whole(request, kv)
            if (host := self._hosts.seek(request, need, kv)) is not None:
                return Grant(now=blocks, blocks=blocks, tokens=tokens, lender=host)
        blocks, unused = kv.blocks_for(known), kv.unused(PROMPTS)
        if blocks <= unused:
            return Grant(now=blocks, blocks=blocks, tokens=known, lender=PROMPTS)
        if blocks <= kv.available and not self._generation_waits(kv):
            return Grant(now=blocks, blocks=blocks, tokens=known)
        if self._may_displace(request, kv):
            return Grant(now=blocks, blocks=blocks, tokens=known, draws=PROMPTS)
        if self._now >= request.arrival + self._overdue_s:
            return Wait.WAIT
        return Wait.PASS if unused or (self._hosts is not None and self._hosts.has_room(kv)) else Wait.WAIT

    def _has_outgrown(self, request: Request, kv: KVAccounts) -> bool:
        """Whether the request has used up an exact claim, and not one for its prompt."""
        return kv.lender_of(request) is not PROMPTS and len(request.prompt) < request.claimed < UNLIMITED

    def _more(self, request: Request, target: int, kv: KVAccounts) -> Grant | None:
        """What is added to the claim of a request that outgrew it: as much as it is expected to need or, failing that,
        a block."""
        tokens = self._lengths.kv_tokens(request, target - len(request.prompt))
        lender = kv.lender_of(request)
        for blocks in (kv.blocks_for(tokens), kv.blocks_for(target)):
            if kv.shortfall_of_claim(request, blocks, lender) <= kv.unused(PROMPTS):
                most = min(tokens, blocks * kv.block_size)
                return Grant(now=blocks, blocks=blocks, tokens=most, lender=lender, draws=PROMPTS)
        return None

    def _whole(self, request: Request, kv: KVAccounts) -> tuple[int, int, int]:
        """For a request without KV: tokens and blocks for all of it, and what a host must have unused."""
        # Asked for at every step, for many that wait.
        known, forecast = request.known, request.forecast
        kept = self._wholes.get(request)
        if kept is None or kept[0] is not forecast or kept[1] != known:
            assert self._hosts is not None
            tokens = self._lengths.kv_tokens(request, known - len(request.prompt), guest=True)
            blocks = kv.blocks_for(tokens)
            # The step that computes the prompt is one more.
            need = self._hosts.need(blocks, tokens - known + 1, kv)
            kept = self._wholes[request] = forecast, known, (tokens, blocks, need)
        return kept[2]

    def _may_displace(self, request: Request, kv: KVAccounts) -> bool:
        """Whether a request of a later band holds KV, which may then have to make way."""
        band = request.band
        if len(self._bands) <= 1 or max(self._bands) <= band:
            return False
        return any(one.band > band for one in kv.holders())

    @staticmethod
    def _generation_waits(kv: KVAccounts) -> bool:
        # Those that came last wait most likely.
        return any(
            phase_of(request, request.known) is Phase.WAITING and request.finish_reason is None
            for request in kv.latest_holders()
        )

    @staticmethod
    def _is_stuck(request: Request, kv: KVAccounts) -> bool:
        """Whether no other request will give KV back."""
        return not any(
            one.in_flight or phase_of(one, one.known) is Phase.RUNNING for one in kv.holders() if one is not request
        )
