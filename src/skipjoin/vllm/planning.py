"""Builds the planner from the options and vLLM's configuration."""

from __future__ import annotations

from typing import Any

from skipjoin.core.scheduling.scheduler import Scheduler
from skipjoin.policies.cost import LearningCost
from skipjoin.recipes import EngineLimits, Settings
from skipjoin.version import VERSION
from skipjoin.vllm.compat import REFUSED
from skipjoin.vllm.ledger import CountingLedger
from skipjoin.vllm.options import PluginOptions


def make_core(options: PluginOptions, config: Any, ledger: CountingLedger, cost: LearningCost) -> Scheduler:
    """Return the scheduler of the core for a `VllmConfig`.

    Raises:
        ConfigError: The recipe needs what vLLM does not have; the error names the recipe.
    """
    limits, overlaps = config.scheduler_config, bool(config.scheduler_config.async_scheduling)
    depth = config.max_concurrent_batches
    settings = Settings(
        cost,
        getattr(limits, "max_num_active_seqs", None) or limits.max_num_seqs,
        limits.max_num_scheduled_tokens or limits.max_num_batched_tokens,
        slo_s=options.slo_s,
        best_effort_wait_s=options.best_effort_wait_s,
        limits=EngineLimits(
            requests=options.max_requests,
            max_len=config.model_config.max_model_len,
            device_blocks=ledger.device_total,
            cpu_blocks=0,
            block_size=ledger.block_size,
            depth=depth,
        ),
    )
    policies = options.found.build(settings, options.params)
    return Scheduler(policies, ledger, depth=depth, overlap=overlaps)


def describe(options: PluginOptions, core: Scheduler, vllm_version: str) -> str:
    """Return the line that is logged at start."""
    shown = ", ".join(f"{name}={value}" for name, value in options.params.items())
    recipe = f"{options.recipe} ({shown})" if shown else options.recipe
    forecasts = options.forecasts.forecaster or "learned" if options.forecasts is not None else "none"
    refused = ", ".join(feature.name for feature in REFUSED)
    return (
        f"Skipjoin {VERSION} schedules vLLM {vllm_version}: recipe {recipe}, forecasts {forecasts}, {core.depth} steps "
        f"in flight, {core.kv.device_total} blocks of {core.kv.block_size} tokens; evicted KV is recomputed. "
        f"Not supported: {refused}"
    )
