"""User configuration."""

from __future__ import annotations

from skipjoin.config.batches import NOWHERE
from skipjoin.config.engine import EngineConfig
from skipjoin.config.forecast import ForecastConfig
from skipjoin.config.server import HANG_LIMITS, MAX_DEADLINE_MS, TOOL_FORMATS, HangLimits, ServerConfig
from skipjoin.config.shared import Objective, base_url, bytes_per_s, check_not_one_card
from skipjoin.options import ConfigError, unknown

__all__ = [
    "HANG_LIMITS",
    "MAX_DEADLINE_MS",
    "NOWHERE",
    "TOOL_FORMATS",
    "ConfigError",
    "EngineConfig",
    "ForecastConfig",
    "HangLimits",
    "Objective",
    "ServerConfig",
    "base_url",
    "bytes_per_s",
    "check_not_one_card",
    "unknown",
]
