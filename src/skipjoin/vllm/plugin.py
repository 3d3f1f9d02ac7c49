from __future__ import annotations

import sys
from functools import wraps
from importlib import import_module
from typing import Any

from skipjoin.options import ConfigError
from skipjoin.vllm.compat import check_features, chooses_scheduler, remedy
from skipjoin.vllm.options import read_options
from skipjoin.vllm.tier_options import is_chosen


def register() -> None:
    """Let vLLM check Skipjoin's options before it loads the model, if Skipjoin's scheduler is chosen.

    `vllm serve` ends with one line on stderr, and other programs get a `ConfigError`.
    """
    # vLLM is still importing itself.
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

    create = EngineArgs.create_engine_config
    if hasattr(create, "__wrapped__"):
        return

    @wraps(create)
    def create_checked(self: Any, usage_context: Any = None, *args: Any, **kwargs: Any) -> Any:
        config = create(self, usage_context, *args, **kwargs)
        try:
            if chooses_scheduler(config):
                _check_release()
            check_config(config)
        except ConfigError as error:
            if usage_context is UsageContext.OPENAI_API_SERVER:
                sys.exit(f"error: {error}")
            raise
        return config

    EngineArgs.create_engine_config = create_checked


def _check_release() -> None:
    try:
        releases, _ = (import_module(f"skipjoin.vllm.{name}") for name in ("releases", "scheduler"))
    except ImportError as error:
        if not (error.name or "").startswith("vllm"):
            raise
        raise ConfigError(f"this vLLM does not fit the Skipjoin scheduler ({error}): {remedy()}") from error
    releases.check_release()


def check_config(config: Any) -> None:
    if chooses_scheduler(config):
        read_options(config.additional_config)
        check_features(config)
    elif is_chosen(config):
        raise ConfigError("--kv-transfer-config: CpuTier needs --scheduler-cls skipjoin.vllm.Scheduler")
