"""The scheduler of an engine: from a configuration to a recipe's policies, and the bound on waiting that they keep."""

from __future__ import annotations

import math
from dataclasses import replace

from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.kv import KVLedger
from skipjoin.core.policy import CostModel, Policies
from skipjoin.core.scheduler import Scheduler
from skipjoin.engine.load import Loaded
from skipjoin.exec.rank_spec import ModelExecutor
from skipjoin.policies.cost import LearningCost
from skipjoin.policies.eviction import ProactiveSwap, Swap
from skipjoin.policies.predictors import MaxTokens
from skipjoin.policies.starvation import WorstCase, least_bound, most_requests, starvation_after, starvation_within
from skipjoin.recipes import Settings, build


def depth_of(config: EngineConfig, executor: ModelExecutor) -> int:
    """Plans in flight."""
    return config.plans_in_flight(executor.parts[0].device_kind)


def make_scheduler(config: EngineConfig, policies: Policies, kv: KVLedger, depth: int) -> Scheduler:
    # Which token a stage samples, the stage that embeds it learns with the next plan.
    return Scheduler(policies, kv, depth=depth, overlap=config.pipeline_parallel_size == 1)


def plain_settings(config: EngineConfig, cost: CostModel) -> Settings:
    """What the recipe is built from, as far as it is said."""
    predictor = MaxTokens() if config.oracle == "max-tokens" else None
    return Settings(
        cost,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        quantum_s=config.quantum_s,
        predictor=predictor,
        stages=config.pipeline_parallel_size,
    )


def recipe_settings(config: EngineConfig, loaded: Loaded, cost: LearningCost) -> Settings:
    """What the recipe is built from. Raises `ConfigError` for a bound on waiting that cannot be kept."""
    settings = plain_settings(config, cost)
    if config.starvation_bound_s is None:
        alpha = starvation_after(config.slo_s) if config.starvation_s is None else config.starvation_s
        return replace(settings, starvation_s=alpha)
    bound, most = config.starvation_bound_s, _extremes(config, loaded, settings)
    if bound < (least := least_bound(most)):
        fits = most_requests(bound, most)
        hint = f"it would hold with max_num_queued_reqs <= {fits}" if fits else "a smaller max_model_len may help"
        raise ConfigError(
            f"starvation_bound_s must be at least {math.ceil(least * 10) / 10:.1f} s "
            f"with max_num_queued_reqs {most.requests}, got {bound:g}; {hint}"
        )
    return replace(settings, starvation_s=starvation_within(bound, most), paced=False)


def _extremes(config: EngineConfig, loaded: Loaded, settings: Settings) -> WorstCase:
    """The most that can come together in this engine."""
    if config.max_live_requests is None:
        raise ConfigError("starvation_bound_s needs max_live_requests, which the server sets to max_num_queued_reqs")
    eviction = build(config.recipe, settings).eviction
    blocks, host_blocks, block_size = loaded.executor.pools
    return WorstCase(
        settings.cost,
        requests=config.max_live_requests,
        max_len=loaded.max_len,
        max_seqs=settings.max_seqs,
        max_tokens=settings.max_tokens,
        device_blocks=blocks,
        host_blocks=host_blocks if isinstance(eviction, Swap) else 0,
        block_size=block_size,
        depth=depth_of(config, loaded.executor),
        moves_overlapped=isinstance(eviction, ProactiveSwap),
        stages=config.pipeline_parallel_size,
    )
