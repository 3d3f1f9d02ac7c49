"""Waiting for a condition that another task, thread or process makes true, and a clock that a test advances."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# More than any condition takes on a busy machine.
PATIENCE_S = 120.0


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"the condition does not hold after {seconds:g} s"
        time.sleep(0.02)
    return time.monotonic() - begin


class Clock:
    """A clock that only tests advance."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


async def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
