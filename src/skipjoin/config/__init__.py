"""User configuration as frozen dataclasses."""

from __future__ import annotations

from skipjoin.config.batches import NOWHERE
from skipjoin.config.engine import EngineConfig
from skipjoin.config.forecast import ForecastConfig
from skipjoin.config.server import HANG_LIMITS, MAX_DEADLINE_MS, TOOL_FORMATS, HangLimits, ServerConfig
from skipjoin.config.shared import (
    MAX_NUM_SEQS,
    BestEffortWait,
    FairBy,
    KVType,
    MaxBatchedTokens,
    MaxNumSeqs,
    Objective,
    OutputWeight,
    SwapBandwidth,
    SwapType,
    base_url,
    bytes_per_s,
    check_not_one_card,
    check_swap_bandwidth,
    check_swap_type,
)
from skipjoin.options import ConfigError, unknown

__all__ = [
    "HANG_LIMITS",
    "MAX_DEADLINE_MS",
    "MAX_NUM_SEQS",
    "NOWHERE",
    "TOOL_FORMATS",
    "BestEffortWait",
    "ConfigError",
    "EngineConfig",
    "FairBy",
    "ForecastConfig",
    "HangLimits",
    "KVType",
    "MaxBatchedTokens",
    "MaxNumSeqs",
    "Objective",
    "OutputWeight",
    "ServerConfig",
    "SwapBandwidth",
    "SwapType",
    "base_url",
    "bytes_per_s",
    "check_not_one_card",
    "check_swap_bandwidth",
    "check_swap_type",
    "unknown",
]
