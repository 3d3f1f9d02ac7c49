from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Unix clock that follows the system clock forward but never back."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._offset = clock() - monotonic()

    def now(self) -> float:
        self.observe(self._clock())
        return self._offset + self._monotonic()

    def observe(self, seen: float) -> None:
        self._offset = max(self._offset, seen - self._monotonic())
