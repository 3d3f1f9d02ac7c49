from __future__ import annotations

import os
import sys
from inspect import signature
from typing import Any

from skipjoin.options import ConfigError
from skipjoin.sglang.order import VARIABLE, order_of

# SGLang's policy that finds what is cached of every waiting prompt; `lpm` and `hrrn` do so for at most 128.
POLICY = "shortest-prefill-first"
_ARGUMENTS = ["waiting_queue", "temporary_deprioritized"]
_CLASS = "sglang.srt.managers.schedule_policy.SchedulePolicy"
_SORT = "_sort_by_shortest_prefill"


def register() -> None:
    """Let SGLang sort waiting requests in the order that the environment names; without it, change nothing.

    SGLang logs exceptions of plugins and goes on without them, so errors end the process with one line.
    """
    if (name := os.environ.get(VARIABLE)) is None:
        return
    try:
        order = order_of(name)
        _check_release()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(f"{_CLASS}.{_SORT}", order.sort, HookType.REPLACE)
    HookRegistry.register(f"{_CLASS}.__init__", check_policy, HookType.AFTER)


def check_policy(_: None, policy: Any, *args: Any, **kwargs: Any) -> None:
    if policy.policy.value != POLICY:
        sys.exit(f"error: {VARIABLE} needs --schedule-policy {POLICY} and the prefix cache, got {policy.policy.value}")


def _check_release() -> None:
    from sglang.srt.managers.schedule_policy import SchedulePolicy  # noqa: PLC0415

    sort = getattr(SchedulePolicy, _SORT, None)
    if sort is None or list(signature(sort).parameters) != _ARGUMENTS:
        raise ConfigError(f"this SGLang has no {_SORT}({', '.join(_ARGUMENTS)}): use release 0.5.23")
