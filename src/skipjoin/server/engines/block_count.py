"""A count of KV blocks in an engine that runs: what leaks is told, and freed."""

from __future__ import annotations

import logging

from skipjoin.core.kv.interface import Ledger
from skipjoin.core.kv.reservation_tree import LedgerError

logger = logging.getLogger(__name__)


def recover_blocks(kv: Ledger, *, is_idle: bool) -> int:
    """Free the blocks that nothing accounts for; how many there were. Without a bug there are none. is_idle: no request
    is left, no plan in flight and no KV moving, so that no block may be held.

    Raises `LedgerError` where more blocks are free or held than there are: then two requests may write to one block,
    and no output can be trusted.
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
