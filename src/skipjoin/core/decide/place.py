from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from skipjoin.core.context import StepContext
from skipjoin.core.decide.candidates import spare_of_return
from skipjoin.core.decide.evict import Evictor
from skipjoin.core.events import Admitted, Event, Reserved
from skipjoin.core.kv.interface import MISS, BlockLedger, HeldBlocks, Hit
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.policy import Allocation, Deferral, Policies
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Move, Slice
from skipjoin.core.waits import WaitReason


class Residency:
    """Allocator of device KV for the requests of one step.

    Attributes:
        closed: Reason why no more requests without KV are admitted in this step, or None.
        is_selective: Whether the admission policy refused a request without KV and would admit others.
        first: The most important request, or None where nothing depends on it.
        waiting_for_kv: Requests that would run if all their KV were on the device.
        reserved: Requests that got reservations. Policies are notified after the iteration over the ordering.
        overlapped: Swap-ins that the step starts, whose requests wait for them.
        coming: The last request that waits for its swap-in instead of running in this step.
    """

    def __init__(
        self,
        policies: Policies,
        kv: BlockLedger,
        events: list[Event],
        context: StepContext,
        *,
        evictor: Evictor,
        slices: Sequence[Slice],
    ) -> None:
        self.closed: WaitReason | None = None
        self.is_selective = False
        self.short = 0
        self.first: Request | None = None
        self.waiting_for_kv: list[Request] = []
        self.reserved: list[Request] = []
        self.overlapped: list[Move] = []
        self.coming: Request | None = None
        self._is_forced = False
        self._drawn = 0  # blocks that an account cedes to the current reservation
        self._policies = policies
        self._kv = kv
        self._reservations = kv.reservations
        self._events = events
        self._context = context
        self._evictor = evictor
        self._slices = slices
        self._taken = self._counted = 0  # device blocks of the counted slices, and their number
        self._owed = 0  # blocks that skipped, swapped-out requests need
        self._first_waits = False  # whether `first` waits for space with depth > 1
        # Of the last return for which all that it outranks would not suffice: missing blocks, rank, evictions before.
        self._stuck: tuple[int, Any, int] | None = None

    def secure(self, request: Request, held: HeldBlocks | None, target: int) -> HeldBlocks | WaitReason:
        self.short = 0
        found = self._admit(request, target) if held is None else self._extend(request, held, target)
        if isinstance(found, WaitReason):
            self._first_waits = self._first_waits or (request is self.first and self._context.depth > 1)
        return found

    def _admit(self, request: Request, target: int) -> HeldBlocks | WaitReason:
        """Admit a request without KV. A refusal closes the step unless the policy lets others pass."""
        if (reason := self._evictor.barred(request)) is not None:
            self.closed = WaitReason.BEHIND_MEMORY
            return reason
        hit = self._kv.hit(request) if request.computed else MISS
        if hit.tokens:
            if not self._is_forced and (reason := self._refuse_early(request, target, hit)) is not None:
                return reason
            # Held first: an eviction for it might take what it finds.
            self._kv.adopt(request)
        found = self._get_in(request, target, hit)
        if hit.tokens and isinstance(found, WaitReason) and found is not WaitReason.KV_IN_TRANSIT:
            self._kv.release(request)
        return found

    def _refuse_early(self, request: Request, target: int, hit: Hit) -> WaitReason | None:
        allocation = self._ask(request, target)
        if isinstance(allocation, WaitReason):
            return allocation
        self.short = self._missing(request, allocation, target, found=hit.held)
        if allocation.draws is not None:
            self.short -= self._drawable(allocation.draws, request, self.short)
        if self.short <= 0:
            return None
        reason = self._evictor.refusal(request, self.short, parent=allocation.parent)
        if reason is not None:
            self.closed = WaitReason.BEHIND_MEMORY
        return reason

    def _get_in(self, request: Request, target: int, hit: Hit) -> HeldBlocks | WaitReason:
        # The answer may differ from an earlier one, because an adopted hit is no longer available to others.
        allocation = self._ask(request, target)
        if isinstance(allocation, WaitReason):
            return allocation
        kv = self._kv
        missing = partial(self._missing, request, allocation, target)
        if (reason := self._make_room_for(request, allocation, missing, target, newcomer=True)) is not None:
            self.closed = WaitReason.BEHIND_MEMORY
            return reason
        on_cpu, is_first = hit.away * kv.block_size, not request.was_admitted
        self._events.append(Admitted(request, self._context.now, hit.tokens, on_cpu, is_first))
        request.was_admitted = True
        self._reserve(request, allocation)
        request.is_newly_resident = True
        if kv.cache is not None:
            kv.cache.announce(request)
        if hit.away and (tiers := kv.tiers) is not None:
            if not self._is_forced and self._policies.eviction.returns_overlapped(request) and len(kv.holders()) > 1:
                self.overlapped.append(tiers.move_in(request))
                self._miss(request, kv.blocks_for(request.computed))
                return WaitReason.KV_IN_TRANSIT
            self._evictor.blocking += tiers.restore(request, target)
        held = kv.grow(request, target)
        self._evictor.take_slots(request, target)
        return held

    def _missing(self, request: Request, allocation: Allocation, target: int, *, found: int = 0) -> int:
        kv = self._kv
        need = max(allocation.now, allocation.blocks, kv.blocks_for(target)) + allocation.spare - found
        room = need - kv.shortfall_of_reservation(request, need, allocation.parent)
        # More important swapped-out requests have precedence for free blocks.
        return need - max(0, room - self._owed)

    # -- reservations -------------------------------------------------------------------------------------

    def force(self) -> None:
        """From now on, allocate what a request needs for its next step without asking the admission policy.

        Other requests are evicted whole, because kept parts of their KV could fill the device.
        """
        self.closed = None
        self._first_waits = False
        self._owed = 0
        self._is_forced = True
        self._evictor.force()

    def _ask(self, request: Request, target: int) -> Allocation | WaitReason:
        kv = self._kv
        if self._is_forced:
            blocks = max(kv.blocks_for(target), kv.footprint(request))
            return Allocation(now=blocks, blocks=blocks, tokens=target)
        answer = self._policies.admission.reserve(request, target, kv)
        if isinstance(answer, Allocation):
            return answer
        if answer is Deferral.NEWCOMERS:
            self.closed = self.closed or WaitReason.BEHIND_MEMORY
        self.is_selective = self.is_selective or kv.blocks_of(request) is None
        self.short = kv.shortfall(request, target)
        return WaitReason.NO_KV if self.short else WaitReason.HELD_BY_ADMISSION

    def _renew(self, request: Request, target: int, *, newcomer: bool) -> WaitReason | None:
        allocation = self._ask(request, target)
        if isinstance(allocation, WaitReason):
            return allocation
        kv = self._kv
        need = max(allocation.now, allocation.blocks, kv.blocks_for(target))

        def missing() -> int:
            # Free blocks must suffice as well: a reservation of a request that still waits would help no request.
            of_reservation = kv.shortfall_of_reservation(request, need, allocation.parent) + allocation.spare
            return max(of_reservation, kv.shortfall_of_blocks(request, target))

        if (reason := self._make_room_for(request, allocation, missing, target, newcomer=newcomer)) is not None:
            self.closed = self.closed or WaitReason.BEHIND_MEMORY
            return reason
        self._reserve(request, allocation)
        return None

    def _make_room_for(
        self, request: Request, allocation: Allocation, missing: Callable[[], int], target: int, *, newcomer: bool
    ) -> WaitReason | None:
        self._drawn = 0
        if allocation.draws is not None:
            self._drawn = self._drawable(allocation.draws, request, missing())
        parent = allocation.parent
        return self._make_room(request, lambda: missing() - self._drawn, target, parent=parent, newcomer=newcomer)

    def _make_room(
        self, request: Request, missing: Callable[[], int], target: int, *, parent: Owner, newcomer: bool
    ) -> WaitReason | None:
        self.short = missing()
        if self.short <= 0:
            return None
        newcomer = newcomer and not self._is_forced
        return self._evictor.make_room(request, missing, tokens=target, parent=parent, newcomer=newcomer)

    def _make_room_within(self, request: Request, target: int, *, newcomer: bool) -> WaitReason | None:
        kv, reservations, evictor = self._kv, self._reservations, self._evictor
        parent = reservations.parent_of(request) if reservations is not None else None
        is_flat = not (kv.sharing and kv.sharing.lent_blocks) and (reservations is None or reservations.is_flat)
        rank = self._policies.ordering.rank
        if newcomer and is_flat and self._stuck is not None:
            # Whatever a lower-ranked request could evict would not have sufficed for fewer blocks.
            short, best, evictions = self._stuck
            self.short = kv.shortfall(request, target)
            if self.short >= short and len(evictor.evicted) == evictions and best < rank(request):
                return WaitReason.NO_KV
        reason = self._make_room(
            request, lambda: kv.shortfall(request, target), target, parent=parent, newcomer=newcomer
        )
        if reason is not None and evictor.is_stuck and is_flat:
            self._stuck = (self.short, rank(request), len(evictor.evicted))
        return reason

    def _drawable(self, account: Account, request: Request, blocks: int) -> int:
        unused = self._reservations.unused_without(account, request) if self._reservations is not None else 0
        return max(0, min(blocks, unused))

    def _reserve(self, request: Request, allocation: Allocation) -> None:
        self._kv.reserve(request, allocation.blocks, tokens=allocation.tokens, parent=allocation.parent)
        if allocation.draws is not None and self._reservations is not None:
            self._reservations.draw(allocation.draws, self._drawn)
        self.reserved.append(request)
        now = self._context.now
        self._events.append(Reserved(request, now, allocation.parent, allocation.blocks, self._drawn, allocation.group))

    # -- holders ------------------------------------------------------------------------------------------

    def _extend(self, request: Request, held: HeldBlocks, target: int) -> HeldBlocks | WaitReason:
        if not held.is_settled:
            self._miss(request, self._kv.blocks_for(request.computed))
            return WaitReason.KV_IN_TRANSIT
        if held.cpu and not self._is_hasty(request) and self._policies.eviction.returns_overlapped(request):
            self._owed += len(held.cpu)
            self._miss(request, len(held.device))
            return WaitReason.KV_ON_CPU
        if (reason := self._evictor.barred(request)) is not None:
            return reason
        # A swapped-in request is not evicted until a plan that runs it commits. With several plans in flight, one of
        # them would always block the first request, so none is swapped in while that waits.
        if held.away and self._first_waits:
            self.closed = self.closed or WaitReason.BEHIND_MEMORY
            return WaitReason.BEHIND_MEMORY
        # A request whose last tokens were dropped counts as a newcomer until it has recomputed them. Otherwise two
        # requests could evict each other endlessly.
        newcomer = held.away > 0 or request.planned < held.regains
        if target > request.reserved_tokens:
            waits = self._renew(request, target, newcomer=newcomer)
            if waits is not None:
                return waits
        found = (self._return if held.away else self._grow)(request, target, newcomer=newcomer)
        if isinstance(found, WaitReason) and found is not WaitReason.KV_IN_TRANSIT:
            # Otherwise newcomers ranked after it would take the space that it waits for.
            self.closed = self.closed or WaitReason.BEHIND_MEMORY
        return found

    def _grow(self, request: Request, target: int, *, newcomer: bool) -> HeldBlocks | WaitReason:
        kv, evictor = self._kv, self._evictor
        reason = evictor.hindered(request, target)
        if reason is None and kv.shortfall(request, target) > 0:
            reason = self._make_room_within(request, target, newcomer=newcomer)
        if reason is not None:
            return reason
        if kv.sharing is not None:
            evictor.blocking += kv.sharing.take_back(request, target)
        held = kv.grow(request, target)
        evictor.take_slots(request, target)
        return held

    def _return(self, request: Request, target: int, *, newcomer: bool) -> HeldBlocks | WaitReason:
        kv, tiers = self._kv, self._kv.tiers
        may_wait = bool(self._slices) and not self._is_hasty(request)
        spare = spare_of_return(self._policies, kv, request, target) if may_wait else None
        reason = self._make_room_within(request, target + (spare or 0) * kv.block_size, newcomer=newcomer)
        if reason is not None:
            return reason
        moves = tiers.restore(request, target) if tiers is not None else ()
        request.is_newly_resident = True
        held = kv.grow(request, target)
        if spare is None:
            self._evictor.blocking += moves
            return held
        self._evictor.blocking += [move for move in moves if move.direction not in LINK]
        self.overlapped += [move for move in moves if move.direction in LINK]
        self.waiting_for_kv.append(request)
        self.coming = request
        return WaitReason.KV_IN_TRANSIT

    def _is_hasty(self, request: Request) -> bool:
        # The first request does not wait for overlapped moves, because they may never find enough spare blocks.
        return self._is_forced or request is self.first

    def _miss(self, request: Request, blocks: int) -> None:
        if request.in_flight:  # a plan in flight swaps its KV in before its slices
            return
        for slice_ in self._slices[self._counted :]:
            self._taken += self._kv.blocks_for(slice_.start + slice_.tokens)  # not all ledgers have block tables
        self._counted = len(self._slices)
        if self._taken + self._owed + blocks <= self._kv.device_total:
            self.waiting_for_kv.append(request)
        else:
            # More important requests fill the device.
            self.closed = self.closed or WaitReason.BEHIND_MEMORY
