from __future__ import annotations

# Weight of a gap in the running mean.
_RATE = 0.02


class StepGaps:
    """Running mean of the gap between consecutive steps.

    It is the time of decisions, messages and bookkeeping, unless the next step overlaps it.
    """

    def __init__(self) -> None:
        self.mean_s: float | None = None
        self._ended: float | None = None

    def step_ended(self, now: float, seconds: float) -> None:
        """Record the end of a step and its duration."""
        if self._ended is not None:
            gap = max(0.0, now - self._ended - seconds)
            self.mean_s = gap if self.mean_s is None else self.mean_s + _RATE * (gap - self.mean_s)
        self._ended = now

    def paused(self) -> None:
        """Do not count the time until the next step, because there is nothing to run."""
        self._ended = None
