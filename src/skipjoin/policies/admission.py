from __future__ import annotations

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Allocation
from skipjoin.core.request import Request

# Share of the device's blocks that an admission leaves for the growth of running requests.
_GROWTH_SHARE = 0.01


class OnDemand:
    """Reserves blocks for the known tokens; further blocks are allocated as the request grows."""

    is_decode_invariant = True

    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation:
        known = kv.blocks_for(request.progress.known)
        # Capped by the pool, so that a request nearly as large as the pool is admitted once it is empty or all others
        # are evicted.
        spare = max(0, min(int(_GROWTH_SHARE * kv.device_total), kv.device_total - known))
        return Allocation(now=known, blocks=known, spare=spare)
