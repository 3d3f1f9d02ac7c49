"""Skipjoin's schedulers inside vLLM: `--scheduler-cls skipjoin.vllm.Scheduler`.

vLLM allocates KV blocks, runs the model and answers clients; the planner and the policies of Skipjoin decide which
requests run in each step. The package uses vLLM's scheduler class, which is not a stable interface, so each release is
tested (`compat.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipjoin.vllm.headers import RequestHeaders
    from skipjoin.vllm.scheduler import Scheduler

__all__ = ["RequestHeaders", "Scheduler"]


def __getattr__(name: str) -> Any:
    # The engine process needs no web framework, and the modules without vLLM are tested where it is not installed.
    if name == "Scheduler":
        from skipjoin.vllm.scheduler import Scheduler  # noqa: PLC0415

        return Scheduler
    if name == "RequestHeaders":
        from skipjoin.vllm.headers import RequestHeaders  # noqa: PLC0415

        return RequestHeaders
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
