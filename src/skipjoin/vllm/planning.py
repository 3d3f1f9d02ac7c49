from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from skipjoin.core.foreign import ForeignScheduler
from skipjoin.policies.cost import LearningCost, LinearCost
from skipjoin.recipes import EngineLimits, Settings
from skipjoin.version import VERSION
from skipjoin.vllm.compat import REFUSED
from skipjoin.vllm.counts import GroupedPool, ManagedPool, frees
from skipjoin.vllm.histories import Limits, RequestHistories
from skipjoin.vllm.ledger import CountingLedger, GroupedLedger
from skipjoin.vllm.options import PluginOptions

# First estimate of a step's duration, for GPUs. On a CPU, steps take up to 100 times as long.
START_COST = LinearCost(floor=2e-3, prefill_token=2e-5, decode=1e-4, context_token=1e-7)
_DOUBT = 10.0


def make_ledger(scheduler: Any) -> tuple[CountingLedger, LearningCost]:
    manager, tier = scheduler.kv_cache_manager, scheduler.connector
    groups = manager.coordinator.single_type_managers
    ahead = {"drafts": scheduler.num_spec_tokens, "max_len": scheduler.max_model_len}
    if len(groups) > 1 or any(map(frees, groups)):
        return GroupedLedger(GroupedPool(manager), **ahead), LearningCost(START_COST, doubt=_DOUBT)
    pool = ManagedPool(manager)
    if tier is None:
        return CountingLedger(pool, **ahead), LearningCost(START_COST, doubt=_DOUBT)
    cost = replace(START_COST, block=tier.options.block_s(tier.block_bytes))
    return CountingLedger(pool, tier.total, **ahead), LearningCost(cost, doubt=_DOUBT)


def make_core(options: PluginOptions, config: Any, ledger: CountingLedger, cost: LearningCost) -> ForeignScheduler:
    limits, overlaps = config.scheduler_config, bool(config.scheduler_config.async_scheduling)
    depth = config.max_concurrent_batches
    settings = Settings(
        cost,
        getattr(limits, "max_num_active_seqs", None) or limits.max_num_seqs,
        limits.max_num_scheduled_tokens or limits.max_num_batched_tokens,
        slo_s=options.slo_s,
        best_effort_wait_s=options.best_effort_wait_s,
        fair_output_weight=options.fair_output_weight,
        limits=EngineLimits(
            requests=options.max_requests,
            max_len=config.model_config.max_model_len,
            device_blocks=ledger.device_total,
            cpu_blocks=tiers.cpu_total if (tiers := ledger.tiers) is not None else 0,
            block_size=ledger.block_size,
            depth=depth,
        ),
    )
    policies = options.found.build(settings, options.params)
    return ForeignScheduler(policies, ledger, depth=depth, overlap=overlaps)


def make_histories(
    options: PluginOptions, config: Any, ledger: CountingLedger, clock: Callable[[], float]
) -> RequestHistories | None:
    if options.metrics_port is None:
        return None
    bounds = config.scheduler_config
    limits = Limits(
        bounds.max_num_seqs, bounds.max_num_batched_tokens, ledger.device_total, ledger.block_size, options.recipe
    )
    return RequestHistories(limits, config.parallel_config.data_parallel_index, clock)


def describe(options: PluginOptions, core: ForeignScheduler, vllm_version: str) -> str:
    shown = ", ".join(f"{name}={value}" for name, value in options.params.items())
    recipe = f"{options.recipe} ({shown})" if shown else options.recipe
    forecasts = options.forecasts.forecaster or "learned" if options.forecasts is not None else "none"
    tiers = core.kv.tiers
    evicted = f"moves to {tiers.cpu_total} blocks of CPU memory" if tiers is not None else "is recomputed"
    refused = ", ".join(feature.name for feature in REFUSED)
    return (
        f"Skipjoin {VERSION} schedules vLLM {vllm_version}: recipe {recipe}, forecasts {forecasts}, {core.depth} steps "
        f"in flight, {core.kv.device_total} blocks of {core.kv.block_size} tokens; evicted KV {evicted}. "
        f"Not supported: {refused}"
    )
