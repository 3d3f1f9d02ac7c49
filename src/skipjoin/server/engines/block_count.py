from __future__ import annotations

import logging

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.interface import BlockLedger

logger = logging.getLogger(__name__)


def recover_blocks(kv: BlockLedger, *, is_idle: bool) -> int:
    """Free leaked blocks and return their number, which is 0 unless there is a bug.

    If `is_idle`, no request, plan or swap is in flight, so any held block is leaked.

    Raises:
        LedgerError: Two requests may write to one block, so outputs may be wrong.
    """
    forgotten = list(kv.holders()) if is_idle else []
    if not forgotten and kv.leaked == (0, 0):
        return 0
    device, cpu = kv.leaked
    if device < 0 or cpu < 0:
        raise LedgerError(f"KV blocks are in two places at once: {-min(device, cpu)} too many are free or held")
    held = kv.device_total - kv.device_free - device - cpu
    if kv.tiers is not None:
        held += kv.tiers.cpu_total - kv.tiers.cpu_free
    for request in forgotten:
        kv.release(request)
    lost = kv.reclaim() + (held if forgotten else 0)
    logger.error("%d KV blocks were neither free nor held by a request that lives; they are free again", lost)
    return lost
