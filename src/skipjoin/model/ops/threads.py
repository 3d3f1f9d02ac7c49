"""Thread count of compiled operations, set per calling thread as in torch."""

from __future__ import annotations

import logging
import threading

import torch

from skipjoin.system.container import usable_cpus

_log = logging.getLogger(__name__)
_own = threading.local()


def default_threads(wanted: int | None = None) -> int:
    usable = usable_cpus()
    if wanted is None:
        return min(torch.get_num_threads(), usable)
    if wanted > usable:
        _log.warning(
            "threads %d: only %d can run at once (affinity and CPU quota), so that steps take longer than with %d",
            wanted, usable, usable,
        )  # fmt: skip
    return wanted


def share_between(count: int) -> None:
    _own.count = count


def threads_here() -> int:
    count: int | None = getattr(_own, "count", None)
    return torch.get_num_threads() if count is None else count
