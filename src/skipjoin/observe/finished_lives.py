from __future__ import annotations

from collections.abc import Iterator

from skipjoin.observe.life import Life

# Time for which finished requests are kept, as operators ask about them minutes later.
KEEP_S = 600.0
# Bounds of the memory: 100,000 intervals take about 20 MB.
MAX_FINISHED = 4096
MAX_INTERVALS = 100_000


class FinishedLives:
    """Requests that finished in the last `keep_s` seconds, of `total` so far."""

    def __init__(
        self, *, keep_s: float = KEEP_S, max_finished: int = MAX_FINISHED, max_intervals: int = MAX_INTERVALS
    ) -> None:
        self._keep_s = keep_s
        self._max_finished = max_finished
        self._max_intervals = max_intervals
        self._lives: dict[int, Life] = {}  # oldest first
        self._intervals = 0
        self.total = 0

    def add(self, life: Life, now: float) -> None:
        self._lives[life.number] = life
        self._intervals += len(life.intervals)
        self.total += 1
        self._forget_old(now)

    def find(self, number: int, now: float) -> Life | None:
        self._forget_old(now)
        return self._lives.get(number)

    def since(self, since: float, now: float) -> Iterator[Life]:
        self._forget_old(now)
        for life in reversed(self._lives.values()):
            if life.ended is not None and life.ended < since:
                return
            yield life

    def after(self, total: int, most: int) -> list[Life]:
        """Return the lives that ended since `self.total` was `total`, the newest `most` at most."""
        wanted = min(self.total - total, most, len(self._lives))
        newest = reversed(self._lives.values())
        return [life for life, _ in zip(newest, range(wanted), strict=False)]

    def _forget_old(self, now: float) -> None:
        while self._lives:
            life = next(iter(self._lives.values()))
            is_old = life.ended is not None and life.ended < now - self._keep_s
            if not is_old and len(self._lives) <= self._max_finished and self._intervals <= self._max_intervals:
                return
            del self._lives[life.number]
            self._intervals -= len(life.intervals)
