from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skipjoin.core.decide.plan import begin_decision
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.events import Admitted, Preempted, Preemption, Reserved, Waited
from skipjoin.core.kv.operations import BlockLedger
from skipjoin.core.policy import Allocation, Deferral
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepPlan
from skipjoin.core.waits import WaitReason, WaitState


class ForeignScheduler(Scheduler):
    """Scheduler for an engine that changes plans, whose ledger has what each request holds, or that receives KV.

    Until they are added, only the admission policy knows requests that `expect` KV of another engine.
    """

    def __init__(self, policies: Policies, kv: BlockLedger, *, depth: int = 1, overlap: bool = False) -> None:
        super().__init__(policies, kv, depth=depth, overlap=overlap)
        self._expected: dict[Request, Allocation] = {}

    def expect(self, request: Request, now: float) -> bool:
        """Admit a request and pin device blocks for its computed tokens, without an eviction.

        Returns:
            False if that is impossible, or if swapped-out requests need the room.
        """
        kv, tiers = self.kv, self.kv.tiers
        if tiers is None or (kv.states is not None and not kv.states.free):
            return False
        begin_decision(self.policies, kv, now)
        allocation = self.policies.admission.reserve(request, request.progress.known, kv)
        if isinstance(allocation, Deferral):
            return False
        blocks = kv.blocks_for(request.progress.known)
        need = max(allocation.now, allocation.blocks, blocks) + allocation.spare
        swapped_out = tiers.cpu_total - tiers.cpu_free
        short = kv.shortfall_of_reservation(request, need, allocation.parent) + swapped_out
        if short > 0 or blocks > kv.device_free:
            return False
        kv.reserve(request, allocation.blocks, tokens=allocation.tokens, parent=allocation.parent)
        tiers.expect(request)
        self._expected[request] = allocation
        return True

    def add(self, request: Request, now: float) -> None:
        super().add(request, now)
        if (allocation := self._expected.pop(request, None)) is None or (tiers := self.kv.tiers) is None:
            return
        tiers.receive(request)
        request.progress.place()
        reserved = Reserved(request, now, allocation.parent, allocation.blocks, group=allocation.group)
        self.events += (Admitted(request, now, is_first=False), reserved)
        for notify in self.policies.on_reserved:
            notify(request, allocation, now)

    def amend(self, plan: StepPlan, slices: Sequence[Slice], now: float) -> StepPlan:
        """Replace the slices of the latest plan by those that the engine runs; requests that are left out wait for KV.

        Raises:
            ValueError: The plan is not the latest one in flight.
        """
        if not self._in_flight or self._in_flight[-1] is not plan:
            raise ValueError(f"plan {plan.id} is not the latest in flight")
        for slice_ in plan.slices:
            slice_.request.progress.withdraw(slice_.start, slice_.samples)
        for slice_ in slices:
            slice_.request.progress.begin(slice_.start + slice_.tokens, slice_.samples, plan.id)
        run = {slice_.request for slice_ in slices}
        for slice_ in plan.slices:
            if slice_.request not in run:
                self._leave_out(slice_.request, now)
        amended = self._in_flight[-1] = self._recent[-1] = replace(plan, slices=tuple(slices))
        return amended

    def insert(self, slices: Sequence[Slice], now: float) -> StepPlan:
        """Add a plan that the engine made itself.

        Raises:
            ValueError: The pipeline is full.
        """
        if len(self._in_flight) >= self.depth:
            raise ValueError(f"{self.depth} plans are in flight already")
        plan = StepPlan(self._next_id, ())
        self._next_id += 1
        for slice_ in slices:
            self.waits.pop(slice_.request, None)
        self._in_flight.append(plan)
        self._note_pauses(plan, len(slices), now)
        return self.amend(plan, slices, now)

    def lose(self, request: Request, now: float) -> None:
        """Reset a request whose KV the engine evicted, and drop its slices from the plans in flight."""
        for index, plan in enumerate(self._in_flight):
            kept = tuple(slice_ for slice_ in plan.slices if slice_.request is not request)
            if len(kept) < len(plan.slices):
                self._in_flight[index] = replace(plan, slices=kept)
        self.kv.release(request)
        self._drop(request, 0, now)

    def _leave_out(self, request: Request, now: float) -> None:
        if self.kv.blocks_of(request) is None:  # a prefix-cache hit was credited to it
            request.progress.rewind(0)
        request.progress.pause()
        self.waits[request] = WaitState(WaitReason.NO_KV, now)
        self.events += (Preempted(request, now, Preemption.PAUSE), Waited(request, now, WaitReason.NO_KV))
