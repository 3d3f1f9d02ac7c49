"""Detection of leaked KV blocks at run time."""

from __future__ import annotations

import logging

from skipjoin.core.kv.interface import Ledger
from skipjoin.core.kv.reservation_tree import LedgerError

logger = logging.getLogger(__name__)


def recover_blocks(kv: Ledger, *, is_idle: bool) -> int:
    """Free leaked blocks and return their number, which is 0 unless there is a bug.

    Args:
        is_idle: True if there are no requests, plans or swaps in flight, so that any held block is leaked.

    Raises:
        LedgerError: Blocks are counted twice, so two requests may write to one block and outputs may be wrong.
    """
    forgotten = list(kv.holders()) if is_idle else []
    if not forgotten and kv.astray == (0, 0):
        return 0
    device, host = kv.astray
    if device < 0 or host < 0:
        raise LedgerError(f"KV blocks are in two places at once: {-min(device, host)} too many are free or held")
    held = kv.device_total + kv.host_total - kv.device_free - kv.host_free - device - host
    for request in forgotten:
        kv.release(request)
    lost = kv.recover() + (held if forgotten else 0)
    logger.error("%d KV blocks were neither free nor held by a request that lives; they are free again", lost)
    return lost
