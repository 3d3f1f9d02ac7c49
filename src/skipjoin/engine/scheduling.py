from __future__ import annotations

from skipjoin.config import EngineConfig
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.kv.operations import BlockLedger
from skipjoin.core.policy import CostModel
from skipjoin.core.policy_set import Policies
from skipjoin.engine.load import Loaded
from skipjoin.exec.rank_spec import ModelExecutor
from skipjoin.recipes import EngineLimits, Settings


def depth_of(config: EngineConfig, executor: ModelExecutor) -> int:
    return config.plans_in_flight(executor.rank_specs[0].device_kind)


def make_scheduler(config: EngineConfig, policies: Policies, kv: BlockLedger, depth: int) -> Scheduler:
    # With several stages, the first stage learns a sampled token only with the next plan.
    return Scheduler(policies, kv, depth=depth, overlap=config.pipeline_parallel_size == 1)


def recipe_settings(config: EngineConfig, cost: CostModel, limits: EngineLimits | None = None) -> Settings:
    return Settings(
        cost,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        slo_s=config.slo_s,
        best_effort_wait_s=config.best_effort_wait_s,
        fair_output_weight=config.fair_output_weight,
        stages=config.pipeline_parallel_size,
        limits=limits,
    )


def engine_limits(config: EngineConfig, loaded: Loaded) -> EngineLimits:
    blocks, cpu_blocks, block_size = loaded.executor.pools
    return EngineLimits(
        requests=config.max_live_requests,
        max_len=loaded.max_len,
        device_blocks=blocks,
        cpu_blocks=cpu_blocks,
        block_size=block_size,
        depth=depth_of(config, loaded.executor),
    )
