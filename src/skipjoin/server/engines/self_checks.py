from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.kv.operations import BlockLedger

logger = logging.getLogger(__name__)

# Time without a plan after which the engine drops all KV. A healthy engine plans within milliseconds.
RESTART_AFTER_S = 1.0


class StallError(RuntimeError):
    pass


class StallWatch:
    """Restarts a stalled engine core. Raises `StallError` after `limit_s` without a plan."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since: float | None = None
        self._has_restarted = False

    def check(self, core: EngineCore) -> None:
        if not core.is_stalled:
            self._since, self._has_restarted = None, False
            return
        now = self._clock()
        if self._since is None:
            self._since = now
        stalled_s = now - self._since
        if stalled_s >= self._limit_s:
            raise StallError(f"no step could be planned for {stalled_s:.0f} s: {_describe(core)}")
        if stalled_s >= RESTART_AFTER_S and not self._has_restarted:
            self._has_restarted = True
            logger.error("nothing is in flight, and no step can be planned; all KV is dropped: %s", _describe(core))
            core.restart(now)


def _describe(core: EngineCore) -> str:
    waits = (core.wait_of(request) for request in core.requests.values())
    reasons = Counter(wait.reason.value if wait is not None else "none" for wait in waits)
    counts = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
    return f"{len(core.requests)} requests wait ({counts}); {core.kv.device_free} of {core.kv.device_total} blocks free"


def recover_blocks(kv: BlockLedger, *, is_idle: bool) -> int:
    """Free leaked blocks and return their number, which is 0 unless there is a bug.

    If `is_idle`, any held block is leaked.

    Raises:
        LedgerError: Two requests may write to one block.
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
    logger.error("%d KV blocks were neither free nor held by a live request; they are free again", lost)
    return lost
