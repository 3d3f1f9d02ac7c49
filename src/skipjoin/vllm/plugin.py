"""Entry point of `vllm.general_plugins`, which vLLM calls at the start of each of its processes."""

from __future__ import annotations

from functools import wraps
from typing import Any

from skipjoin.vllm.compat import check_features, check_tier, chooses_scheduler
from skipjoin.vllm.options import read_options


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
    """Raise `ConfigError` if a `VllmConfig` chooses Skipjoin's scheduler or CPU tier and it cannot run."""
    check_tier(config)
    if chooses_scheduler(config):
        read_options(config.additional_config)
        check_features(config)
