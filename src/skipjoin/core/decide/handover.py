from __future__ import annotations

from skipjoin.core.decide.plan import begin_decision
from skipjoin.core.kv.interface import BlockLedger
from skipjoin.core.policy import Allocation, Deferral, Policies
from skipjoin.core.request import Request


class Incoming:
    """Requests whose KV is in transit from another engine. Until it arrives, only the admission policy knows them."""

    def __init__(self, policies: Policies, kv: BlockLedger) -> None:
        self._policies = policies
        self._kv = kv
        self._allocations: dict[Request, Allocation] = {}

    def expect(self, request: Request, now: float) -> bool:
        """Admit a request and fence device blocks for its computed tokens. Nothing is evicted.

        Returns:
            False if the ledger cannot receive KV, the admission policy refuses, or there is no room beyond what
            swapped-out requests need.
        """
        kv, tiers = self._kv, self._kv.tiers
        if tiers is None:
            return False
        begin_decision(self._policies, kv, now)
        allocation = self._policies.admission.reserve(request, request.known, kv)
        if isinstance(allocation, Deferral):
            return False
        blocks = kv.blocks_for(request.known)
        need = max(allocation.now, allocation.blocks, blocks) + allocation.spare
        swapped_out = tiers.cpu_total - tiers.cpu_free
        short = kv.shortfall_of_reservation(request, need, allocation.parent) + swapped_out
        if short > 0 or blocks > kv.device_free:
            return False
        kv.reserve(request, allocation.blocks, tokens=allocation.tokens, parent=allocation.parent)
        tiers.expect(request)
        self._allocations[request] = allocation
        return True

    def receive(self, request: Request) -> Allocation | None:
        """Return the reservation of a request whose KV has arrived, None for one that was not expected."""
        allocation = self._allocations.pop(request, None)
        if allocation is not None and self._kv.tiers is not None:
            self._kv.tiers.receive(request)
            request.was_admitted = request.is_newly_resident = True
        return allocation
