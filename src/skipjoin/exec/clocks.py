from __future__ import annotations

import time

import torch

# Seconds on the CPU's clock, or an event on a CUDA stream.
Mark = float | torch.cuda.Event


class CpuClock:
    def mark(self) -> Mark:
        return time.perf_counter()

    def between(self, start: Mark, end: Mark) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def is_past(self, mark: Mark) -> bool:
        return True


class DeviceClock:
    """CUDA stream clock, whose marks do not block the CPU."""

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
        ms: float = start.elapsed_time(end)
        return ms * 1e-3

    def is_past(self, mark: Mark) -> bool:
        assert isinstance(mark, torch.cuda.Event)
        return bool(mark.query())
