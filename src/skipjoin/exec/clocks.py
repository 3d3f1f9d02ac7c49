"""When a step began and ended: on the host, or in the order in which a device works."""

from __future__ import annotations

import time
from typing import Protocol

import torch

# Seconds of the host, or an event that the device passes.
Mark = float | torch.cuda.Event


class Clock(Protocol):
    """Marks moments, and tells the seconds between two of them."""

    def mark(self) -> Mark: ...

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds; waits for both."""
        ...

    def is_past(self, mark: Mark) -> bool: ...


class HostClock:
    """Moments on the host, when all that was queued on the device is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()

    def between(self, start: Mark, end: Mark) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def is_past(self, mark: Mark) -> bool:
        return True


class DeviceClock:
    """Moments between two pieces of a stream's work: the host goes on at once, and the seconds are the device's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Mark, end: Mark) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def is_past(self, mark: Mark) -> bool:
        assert isinstance(mark, torch.cuda.Event)
        return mark.query()
