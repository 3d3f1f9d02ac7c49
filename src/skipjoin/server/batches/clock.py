"""Time that never goes back."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Unix seconds that go on when the system's clock is set back, and follow it when it is set forward.

    So windows end, and files expire, after the seconds that they were given. clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._offset = clock() - monotonic()

    def now(self) -> float:
        """Unix seconds."""
        self.observe(self._clock())
        return self._offset + self._monotonic()

    def observe(self, seen: float) -> None:
        """It is at least this time: what the database has recorded, or its own clock, says so."""
        self._offset = max(self._offset, seen - self._monotonic())
