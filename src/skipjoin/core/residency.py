"""How a request comes to have its KV on the device: it is admitted, it returns from the host, it grows."""

from __future__ import annotations

from collections.abc import Sequence

from skipjoin.core.context import StepContext
from skipjoin.core.events import Admitted, Event
from skipjoin.core.evictor import Evictor
from skipjoin.core.kv import KVLedger, RequestBlocks
from skipjoin.core.policy import Policies, Wait
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.core.waits import WaitReason


class Residency:
    """Device space for the requests of one step.

    closed: why no request without KV gets in any more in this step, or None. short: blocks that were missing for the
    last request that got none. first: the request that matters most, or None where nothing depends on it.
    waiting_for_kv: requests that would run if their KV were on the device.

    slices: of the step, as far as it is filled.
    """

    def __init__(
        self,
        policies: Policies,
        kv: KVLedger,
        events: list[Event],
        context: StepContext,
        *,
        evictor: Evictor,
        slices: Sequence[Slice],
    ) -> None:
        self.closed: WaitReason | None = None
        self.short = 0
        self.first: Request | None = None
        self.waiting_for_kv: list[Request] = []
        self._policies = policies
        self._kv = kv
        self._events = events
        self._context = context
        self._evictor = evictor
        self._slices = slices
        self._taken = self._counted = 0  # device blocks of the first slices, and how many slices those are
        self._owed = 0  # blocks that requests passed over while their KV is on the host need to come back
        self._first_waits = False  # for space, with plans in flight

    def secure(self, request: Request, held: RequestBlocks | None, target: int) -> RequestBlocks | WaitReason:
        """Device space for `target` tokens of the request, or why it waits."""
        self.short = 0
        found = self._admit(request, target) if held is None else self._extend(request, held, target)
        if isinstance(found, WaitReason):
            self._first_waits = self._first_waits or (request is self.first and self._context.depth > 1)
        return found

    def _admit(self, request: Request, target: int) -> RequestBlocks | WaitReason:
        """First blocks for a request that holds none. A refusal closes the step: no request overtakes it."""
        self.closed = WaitReason.BEHIND_MEMORY
        if self._evictor.is_below_floor(request):
            return WaitReason.BEHIND_MEMORY
        kv = self._kv
        grant = self._policies.admission.admit(request, kv)
        if isinstance(grant, Wait):
            self.short = kv.shortfall(request, target)
            return WaitReason.NO_KV if self.short else WaitReason.HELD_BY_ADMISSION
        need = max(grant.now, grant.blocks, kv.blocks_for(target)) + grant.spare
        # Requests that matter more and are on their way back from the host come first to what is free.
        self.short = need - max(0, kv.available - self._owed)
        if (reason := self._evictor.make_room(request, self.short, newcomer=True)) is not None:
            return reason
        self.closed = None
        kv.promise(request, grant.blocks)
        self._events.append(Admitted(request, self._context.now))
        request.is_fresh = True
        return kv.grow(request, target)

    def _extend(self, request: Request, held: RequestBlocks, target: int) -> RequestBlocks | WaitReason:
        """Space for a request that holds KV, on either tier or on its way."""
        if held.moving is not None:
            self._miss(request, len(held.host))
            return WaitReason.KV_IN_TRANSIT
        # The first request does not wait for overlapped moves: the space that they need may never be left over.
        if held.host and request is not self.first and self._policies.eviction.returns_overlapped(request):
            self._owed += len(held.host)
            self._miss(request, 0)
            return WaitReason.KV_ON_HOST
        if self._evictor.is_below_floor(request):
            return WaitReason.BEHIND_MEMORY
        found = self._return(request, len(held.host), target) if held.host else self._grow(request, target)
        if isinstance(found, WaitReason):
            # Newcomers ranked below would take the space that it waits for, one after the other.
            self.closed = self.closed or WaitReason.BEHIND_MEMORY
        return found

    def _grow(self, request: Request, target: int) -> RequestBlocks | WaitReason:
        self.short = self._kv.shortfall(request, target)
        reason = self._evictor.make_room(request, self.short, newcomer=False)
        return self._kv.grow(request, target) if reason is None else reason

    def _return(self, request: Request, blocks: int, target: int) -> RequestBlocks | WaitReason:
        """Bring the request's KV back from the host with a blocking move.

        A request that returned is spared until the plan commits that runs it. With other plans in flight there would
        always be one that the first request may not evict: while that waits, no other returns.
        """
        if self._first_waits:
            return WaitReason.BEHIND_MEMORY
        kv = self._kv
        self.short = max(blocks, kv.blocks_for(target)) - kv.available
        if (reason := self._evictor.make_room(request, self.short, newcomer=True)) is not None:
            return reason
        self._evictor.blocking.append(kv.move_in(request))
        request.is_fresh = True
        return kv.grow(request, target)

    def _miss(self, request: Request, blocks: int) -> None:
        """The request is passed over because its KV is not on the device. blocks: its own that are in transit."""
        if request.in_flight:  # its KV arrives just before the slices of a plan that has not committed
            return
        for piece in self._slices[self._counted :]:
            self._taken += len(piece.blocks)
        self._counted = len(self._slices)
        if self._taken + self._owed + blocks <= self._kv.device_total:
            self.waiting_for_kv.append(request)
        else:
            # The requests that matter more than all from here on fill the device.
            self.closed = self.closed or WaitReason.BEHIND_MEMORY
