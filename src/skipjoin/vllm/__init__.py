"""Skipjoin's schedulers inside vLLM: `--scheduler-cls skipjoin.vllm.Scheduler`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipjoin.vllm.cpu_tier import CpuTier
    from skipjoin.vllm.headers import RequestHeaders
    from skipjoin.vllm.scheduler import Scheduler

__all__ = ["CpuTier", "RequestHeaders", "Scheduler"]

_MODULES = {"CpuTier": "cpu_tier", "RequestHeaders": "headers", "Scheduler": "scheduler"}


def __getattr__(name: str) -> Any:
    # The engine process needs no web framework, and the modules without vLLM are tested where it is not installed.
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
