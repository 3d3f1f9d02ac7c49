from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import Figures, Task, significant, synchronize

PROFILED_STEPS = 10


def gpu_time(task: Task, steps: Callable[[], object]) -> Figures:
    """Measure with a profiler how long the GPU is busy in `PROFILED_STEPS` steps, and their kernels.

    The gap is the idle share between the first kernel and the last one of the same profile, which lengthens both.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if task.device == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profiler:
            steps()
            synchronize(task.device)
        spans = _spans(task, profiler)
    except RuntimeError as error:
        return {"error": str(error)}
    if not spans:
        return {"error": "the profiler recorded no work on the GPU"}
    busy = _union([(start, end) for _, start, end in spans])
    whole = max(end for *_, end in spans) - min(start for _, start, _ in spans)
    by_name: dict[str, list[float]] = {}
    for name, start, end in spans:
        by_name.setdefault(name[:100], []).append((end - start) / 1e3)
    heaviest = sorted(by_name, key=lambda name: -sum(by_name[name]))[:15]
    return {
        "busy_ms": significant(busy / PROFILED_STEPS / 1e3),
        "gap_share": significant(1 - busy / whole),
        "launches_per_step": significant(len(spans) / PROFILED_STEPS),
        "kernels_ms_per_step": {name: significant(sum(by_name[name]) / PROFILED_STEPS) for name in heaviest},
    }


def _spans(task: Task, profiler: Any) -> list[tuple[str, float, float]]:
    """Return name, start and end in microseconds of the work on the device."""
    wanted = torch.autograd.DeviceType.CUDA if task.device == "cuda" else torch.autograd.DeviceType.CPU
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == wanted and event.time_range.end > event.time_range.start
    ]


def _union(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
