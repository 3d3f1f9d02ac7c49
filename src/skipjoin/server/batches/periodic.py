from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from skipjoin.server.batches.records import StoreError

# Maximum pause after consecutive failures.
_LONGEST_S = 5.0
_log = logging.getLogger(__name__)


class PeriodicTask:
    """Periodic task, which logs the first of consecutive failures and pauses longer after each."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]], every_s: float) -> None:
        self._name = name
        self._work = work
        self._every_s = every_s
        self._woken = asyncio.Event()
        self._failures = 0

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            await self._try()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), self._pause_s())

    def _pause_s(self) -> float:
        return max(self._every_s, min(2.0 ** min(self._failures, 9), _LONGEST_S))

    async def _try(self) -> None:
        try:
            await self._work()
            self._failures = 0
        except StoreError as error:
            if not self._failures:
                _log.warning("batches: %s failed, and is tried again: %s", self._name, error)
            self._failures += 1
        except Exception:
            if not self._failures:
                _log.exception("batches: %s failed, and is tried again", self._name)
            self._failures += 1
