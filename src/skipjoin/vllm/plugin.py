"""Entry point of `vllm.general_plugins`, which vLLM calls at the start of each of its processes."""

from __future__ import annotations

from functools import wraps
from typing import Any

from skipjoin.vllm.compat import check_features
from skipjoin.vllm.options import read_options

SCHEDULERS = ("skipjoin.vllm.Scheduler", "skipjoin.vllm.scheduler.Scheduler")


def register() -> None:
    """Let vLLM check Skipjoin's options before it loads the model, if Skipjoin's scheduler is chosen.

    Without this, the scheduler itself reports the same errors, after the model is loaded.
    """
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - vLLM is still importing itself

    create = EngineArgs.create_engine_config
    if hasattr(create, "__wrapped__"):
        return

    @wraps(create)
    def create_checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        check_config(config)
        return config

    EngineArgs.create_engine_config = create_checked


def check_config(config: Any) -> None:
    """Raise `ConfigError` if a `VllmConfig` chooses Skipjoin's scheduler and it cannot run."""
    chosen = config.scheduler_config.scheduler_cls
    name = chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}" if chosen else ""
    if name in SCHEDULERS:
        read_options(config.additional_config)
        check_features(config)
