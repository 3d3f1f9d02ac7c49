from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from skipjoin.core.context import StepContext
from skipjoin.core.decide.draft import Draft
from skipjoin.core.decide.evict import Evictor, Need
from skipjoin.core.events import Admitted, Reserved
from skipjoin.core.kv.interface import MISS, HeldBlocks, Hit
from skipjoin.core.kv.operations import BlockLedger
from skipjoin.core.policy import Allocation, Deferral
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.core.selective import finds_by_needs
from skipjoin.core.step import LINK
from skipjoin.core.waits import WaitReason


class Blocked(NamedTuple):
    """Why a request gets no device KV in this step."""

    reason: WaitReason
    short: int = 0  # number of missing blocks, with NO_KV
    closes: Deferral | None = None  # which later requests without KV wait for memory, too
    joins: bool = False  # it takes its place in the batch, because the step swaps its KV in meanwhile
    is_deferred: bool = False  # the admission policy let it wait


class Placer:
    """Allocates device KV for the requests of one step: admission, swap-in and growth."""

    def __init__(
        self, policies: Policies, kv: BlockLedger, context: StepContext, draft: Draft, evictor: Evictor
    ) -> None:
        self.first: Request | None = None  # the most important one, or None where nothing depends on it
        self._is_forced = False
        self._policies = policies
        self._finds_holders = finds_by_needs(policies.admission)
        self._kv = kv
        self._reservations = kv.reservations
        self._context = context
        self._draft = draft
        self._evictor = evictor
        self._taken = self._counted = 0  # device blocks of the counted slices, and their number
        self._owed = 0  # blocks that skipped, swapped-out requests need
        self._first_waits = False  # whether `first` waits for space with depth > 1
        # Of the last return for which all that it outranks would not suffice: missing blocks, rank, evictions before.
        self._stuck: tuple[int, Any, int] | None = None

    def place(self, request: Request, held: HeldBlocks | None, target: int) -> HeldBlocks | Blocked:
        found = self._admit(request, target) if held is None else self._extend(request, held, target)
        if isinstance(found, Blocked):
            self._first_waits = self._first_waits or (request is self.first and self._context.depth > 1)
        return found

    def force(self) -> None:
        """From now on, evict others whole, and allocate what a request needs next without the admission policy."""
        self._first_waits = False
        self._owed = 0
        self._is_forced = True
        self._evictor.force()

    # -- requests without KV ------------------------------------------------------------------------------

    def _admit(self, request: Request, target: int) -> HeldBlocks | Blocked:
        if (reason := self._evictor.barred(request)) is not None:
            return Blocked(reason, closes=Deferral.INCOMING)
        if not self._evictor.free_state(request):
            return Blocked(WaitReason.NO_KV, closes=Deferral.INCOMING)
        hit = self._kv.hit(request) if request.progress.computed else MISS
        if not hit.tokens:
            return self._enter(request, target, MISS)
        if not self._is_forced and (blocked := self._check(request, target, hit)) is not None:
            return blocked
        # Held first: an eviction for it might take what it finds.
        self._kv.adopt(request)
        found = self._enter(request, target, hit)
        if isinstance(found, Blocked) and found.reason is not WaitReason.KV_IN_TRANSIT:
            self._kv.release(request)
        return found

    def _check(self, request: Request, target: int, hit: Hit) -> Blocked | None:
        """Return why the request cannot be admitted even if plans in flight end."""
        allocation = self.ask(request, target)
        if isinstance(allocation, Blocked):
            return allocation
        need = self._need_of_admission(request, allocation, target, found=hit.held)
        if (short := need.short()) <= 0:
            return None
        choice = self._evictor.choose(need, short)
        is_blocked = choice.reason is not None and choice.pausing is None
        return Blocked(WaitReason.NO_KV, short, Deferral.INCOMING) if is_blocked else None

    def _enter(self, request: Request, target: int, hit: Hit) -> HeldBlocks | Blocked:
        # The answer may differ from an earlier one, because an adopted hit is no longer available to others.
        allocation = self.ask(request, target)
        if isinstance(allocation, Blocked):
            return allocation
        kv, draft = self._kv, self._draft
        need = self._need_of_admission(request, allocation, target)
        if (blocked := self._make_room(need)) is not None:
            return blocked
        on_cpu, is_first = hit.swapped_out * kv.block_size, not request.progress.was_admitted
        draft.events.append(Admitted(request, self._context.now, hit.tokens, on_cpu, is_first))
        request.progress.place()
        self._draft.led_since.pop(request, None)
        self._reserve(request, allocation, need.drawn)
        if kv.cache is not None:
            kv.cache.announce(request)
        if hit.swapped_out and (tiers := kv.tiers) is not None:
            if not self._is_forced and self._policies.eviction.returns_overlapped(request) and len(kv.holders()) > 1:
                draft.overlapped.append(tiers.move_in(request))
                return self._await(request, WaitReason.KV_IN_TRANSIT, kv.blocks_for(request.progress.computed))
            draft.blocking += tiers.restore(request, target)
        held = kv.grow(request, target)
        self._evictor.take_slots(request, target)
        return held

    # -- requests with KV ---------------------------------------------------------------------------------

    def _extend(self, request: Request, held: HeldBlocks, target: int) -> HeldBlocks | Blocked:
        if (reason := self.waits_for_move(request, held)) is WaitReason.KV_IN_TRANSIT:
            return self._await(request, reason, self._kv.blocks_for(request.progress.computed))
        if reason is WaitReason.KV_ON_CPU:
            self._owed += len(held.cpu)
            return self._await(request, reason, len(held.device))
        if (reason := self._evictor.barred(request)) is not None:
            return Blocked(reason)
        # A swapped-in request is not evicted until a plan that runs it commits. With several plans in flight, one of
        # them would always block the first request, so none is swapped in while that waits.
        if held.swapped_out and self._first_waits:
            return Blocked(WaitReason.BEHIND_MEMORY, closes=Deferral.INCOMING)
        # A request whose last tokens were dropped counts as one without KV until it has recomputed them. Otherwise two
        # requests could evict each other endlessly.
        progress = request.progress
        grows = not held.swapped_out and progress.planned >= held.tokens_before_drop
        if target > progress.reserved_tokens:
            if (blocked := self._renew(request, target, grows=grows)) is not None:
                return blocked
            if target <= held.room:
                return held
        return (self._return if held.swapped_out else self._grow)(request, target, grows=grows)

    def waits_for_move(self, request: Request, held: HeldBlocks) -> WaitReason | None:
        """Return why only a move of `EvictionPolicy.ahead` can let the request run, if so."""
        if not held.is_settled:
            return WaitReason.KV_IN_TRANSIT
        must_wait = held.cpu and not self._is_hasty(request) and self._policies.eviction.returns_overlapped(request)
        return WaitReason.KV_ON_CPU if must_wait else None

    def _renew(self, request: Request, target: int, *, grows: bool) -> Blocked | None:
        allocation = self.ask(request, target)
        if isinstance(allocation, Blocked):
            return allocation
        kv = self._kv
        blocks = self.size_of(allocation, target)

        def missing() -> int:
            # Free blocks must suffice as well: a reservation of a request that still waits would help no request.
            of_reservation = kv.shortfall_of_reservation(request, blocks, allocation.parent) + allocation.spare
            return max(of_reservation, kv.shortfall_of_blocks(request, target))

        drawn = 0
        if missing() > 0:
            need = self._need(request, allocation, target, missing, grows=grows)
            if (blocked := self._make_room(need)) is not None:
                return blocked
            drawn = need.drawn
        self._reserve(request, allocation, drawn)
        return None

    def _grow(self, request: Request, target: int, *, grows: bool) -> HeldBlocks | Blocked:
        kv, evictor = self._kv, self._evictor
        if evictor.is_hindered(request, target):
            return Blocked(WaitReason.NO_KV, closes=Deferral.INCOMING)
        if (blocked := self._make_room_within(request, target, grows=grows)) is not None:
            return blocked
        if kv.sharing is not None:
            self._draft.blocking += kv.sharing.take_back(request, target)
        held = kv.grow(request, target)
        evictor.take_slots(request, target)
        return held

    def _return(self, request: Request, target: int, *, grows: bool) -> HeldBlocks | Blocked:
        kv, tiers, draft = self._kv, self._kv.tiers, self._draft
        may_wait = bool(draft.slices) and not self._is_hasty(request)
        spare = self.spare_of_return(request, target) if may_wait else None
        blocked = self._make_room_within(request, target + (spare or 0) * kv.block_size, grows=grows)
        if blocked is not None:
            return blocked
        if not self._evictor.free_state(request):
            return Blocked(WaitReason.NO_KV, closes=Deferral.INCOMING)
        moves = tiers.restore(request, target) if tiers is not None else ()
        request.progress.place()
        held = kv.grow(request, target)
        if spare is None:
            draft.blocking += moves
            return held
        draft.blocking += [move for move in moves if move.direction not in LINK]
        draft.overlapped += [move for move in moves if move.direction in LINK]
        draft.waiting_for_kv.append(request)
        return Blocked(WaitReason.KV_IN_TRANSIT, joins=True)

    def spare_of_return(self, request: Request, target: int) -> int | None:
        """Return how many blocks stay free after a swap-in alongside slices, or None if it is blocking.

        An admission keeps as many, because it would take the blocks back otherwise.
        """
        if not self._policies.eviction.returns_alongside(request):
            return None
        allocation = self._policies.admission.reserve(request, target, self._kv)
        return allocation.spare if isinstance(allocation, Allocation) else 0

    def _is_hasty(self, request: Request) -> bool:
        # The first request does not wait for overlapped moves, because they may never find enough spare blocks.
        return self._is_forced or request is self.first

    def _await(self, request: Request, reason: WaitReason, blocks: int) -> Blocked:
        if request.progress.in_flight:  # a plan in flight swaps its KV in before its slices
            return Blocked(reason)
        slices = self._draft.slices
        for slice_ in slices[self._counted :]:
            self._taken += self._kv.blocks_for(slice_.start + slice_.tokens)  # not all ledgers have block tables
        self._counted = len(slices)
        if self._taken + self._owed + blocks > self._kv.device_total:
            return Blocked(reason, closes=Deferral.INCOMING)
        self._draft.waiting_for_kv.append(request)
        return Blocked(reason)

    # -- reservations and room ----------------------------------------------------------------------------

    def ask(self, request: Request, target: int) -> Allocation | Blocked:
        kv = self._kv
        if self._is_forced:
            blocks = max(kv.blocks_for(target), kv.footprint(request))
            return Allocation(now=blocks, blocks=blocks, tokens=target)
        answer = self._policies.admission.reserve(request, target, kv)
        if isinstance(answer, Allocation):
            return answer
        is_closing = answer is Deferral.INCOMING or self._finds_holders or kv.blocks_of(request) is None
        short = kv.shortfall(request, target)
        reason = WaitReason.NO_KV if short else WaitReason.HELD_BY_ADMISSION
        closes = answer if is_closing else None
        return Blocked(reason, short, closes, is_deferred=True)

    def size_of(self, allocation: Allocation, target: int) -> int:
        return max(allocation.now, allocation.blocks, self._kv.blocks_for(target))

    def _need_of_admission(self, request: Request, allocation: Allocation, target: int, *, found: int = 0) -> Need:
        kv = self._kv
        blocks = self.size_of(allocation, target) + allocation.spare - found

        def missing() -> int:
            room = blocks - kv.shortfall_of_reservation(request, blocks, allocation.parent)
            # More important swapped-out requests have precedence for free blocks.
            return blocks - max(0, room - self._owed)

        return self._need(request, allocation, target, missing, grows=False)

    def _need(
        self, request: Request, allocation: Allocation, target: int, missing: Callable[[], int], *, grows: bool
    ) -> Need:
        account, drawn = allocation.draws, 0
        if account is not None and self._reservations is not None:
            drawn = max(0, min(missing(), self._reservations.unused_without(account, request)))
        return Need(request, target, missing, allocation.parent, grows=grows or self._is_forced, drawn=drawn)

    def _reserve(self, request: Request, allocation: Allocation, drawn: int) -> None:
        self._kv.reserve(request, allocation.blocks, tokens=allocation.tokens, parent=allocation.parent)
        if allocation.draws is not None and self._reservations is not None:
            self._reservations.draw(allocation.draws, drawn)
        self._draft.reserved.append((request, allocation))
        now = self._context.now
        self._draft.events.append(Reserved(request, now, allocation.parent, allocation.blocks, drawn, allocation.group))

    def _make_room(self, need: Need) -> Blocked | None:
        if (short := need.short()) <= 0:
            return None
        choice = self._evictor.make_room(need, short)
        return Blocked(choice.reason, short, Deferral.INCOMING) if choice.reason is not None else None

    def _make_room_within(self, request: Request, target: int, *, grows: bool) -> Blocked | None:
        kv = self._kv
        if (short := kv.shortfall(request, target)) <= 0:
            return None
        reservations, rank = self._reservations, self._policies.ordering.rank
        grows, evictions = grows or self._is_forced, len(self._draft.evicted)
        is_flat = not (kv.sharing and kv.sharing.bidirectional_blocks) and (
            reservations is None or reservations.is_flat
        )
        if not grows and is_flat and self._stuck is not None:
            # Whatever a lower-ranked request could evict would not have sufficed for fewer blocks.
            least, best, before = self._stuck
            if short >= least and before == evictions and best < rank(request):
                return Blocked(WaitReason.NO_KV, short, Deferral.INCOMING)
        parent = reservations.parent_of(request) if reservations is not None else None
        need = Need(request, target, partial(kv.shortfall, request, target), parent, grows=grows)
        choice = self._evictor.make_room(need, short)
        if choice.is_stuck and is_flat:
            self._stuck = (short, rank(request), evictions)
        return Blocked(choice.reason, short, Deferral.INCOMING) if choice.reason is not None else None
