"""Requirements of the scheduler on vLLM: its version, its attributes and its features.

vLLM's scheduler has no stable interface, so all attributes that are used beyond it are named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from skipjoin.options import ConfigError
from skipjoin.vllm.tier_options import TierOptions, is_chosen

# Releases for which the contract tests have passed; see docs/vllm.md.
TESTED = ("0.27.1", "0.30.0", "0.32.0")
# Names of the scheduler in `--scheduler-cls`.
SCHEDULERS = ("skipjoin.vllm.Scheduler", "skipjoin.vllm.scheduler.Scheduler")

# Attributes of the base class. Of two names with a bar between them, one must exist.
METHODS = (
    "schedule",
    "update_from_output",
    "add_request",
    "finish_requests",
    "reset_prefix_cache",
    "shutdown",
    "_preempt_request",
    "_is_blocked_waiting_status",
    "_handle_blocked_waiting_request|_try_promote_blocked_waiting_request",
)
# Attributes of its instances.
STATE = (
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting|skipped_waiting",
    "reset_preempted_req_ids",
    "grammar_compile_error_reqs",
    "scheduler_reserve_full_isl",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "connector",
    "kv_cache_manager.allocate_slots",
    "kv_cache_manager.get_block_ids",
    "kv_cache_manager.get_computed_blocks",
    "kv_cache_manager.block_pool.get_num_free_blocks",
    "kv_cache_manager.block_pool.num_gpu_blocks",
    "kv_cache_manager.coordinator.single_type_managers",
)


class Feature(NamedTuple):
    """Feature of vLLM that the scheduler refuses.

    Attributes:
        flag: Command-line flag that turns it on.
        remedy: What to do instead.
        is_on: Returns whether a `VllmConfig` uses it.
    """

    name: str
    flag: str
    remedy: str
    is_on: Callable[[Any], bool]


REFUSED = (
    Feature(
        "pipeline parallelism",
        "--pipeline-parallel-size",
        "use --tensor-parallel-size",
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
    ),
    Feature(
        "context parallelism",
        "--decode-context-parallel-size",
        "leave it at 1",
        lambda config: (
            config.parallel_config.decode_context_parallel_size > 1
            or getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1
        ),
    ),
    Feature(
        "data-parallel engines of a mixture of experts",
        "--data-parallel-size",
        "use --tensor-parallel-size",
        # Such engines run their steps together, which vLLM's CPU backend cannot.
        lambda config: config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe,
    ),
    Feature(
        "other KV connectors",
        "--kv-transfer-config or --kv-offloading-size",
        "leave them out, or use CpuTier of skipjoin.vllm",
        lambda config: config.kv_transfer_config is not None and not is_chosen(config),
    ),
    Feature(
        "encoder-cache connectors",
        "--ec-transfer-config",
        "leave it out",
        lambda config: getattr(config, "ec_transfer_config", None) is not None,
    ),
    Feature(
        "speculative decoding",
        "--speculative-config",
        "leave it out",
        lambda config: config.speculative_config is not None,
    ),
    Feature(
        "multimodal input",
        "--limit-mm-per-prompt",
        "set --language-model-only",
        # Older releases do not tell whether the model is served with text only.
        lambda config: getattr(
            config.model_config, "supports_multimodal_inputs", config.model_config.is_multimodal_model
        ),
    ),
    Feature(
        "encoder-decoder models",
        "--model",
        "choose a decoder-only model",
        lambda config: config.model_config.is_encoder_decoder,
    ),
    Feature(
        "pooling models",
        "--runner",
        "choose a model that generates",
        lambda config: config.model_config.runner_type == "pooling",
    ),
    Feature(
        "diffusion models",
        "--model",
        "choose an autoregressive model",
        lambda config: getattr(config.model_config, "is_diffusion", False),
    ),
    Feature(
        "a watermark of free blocks",
        "--watermark",
        "leave it at 0, because the recipe decides about admission",
        lambda config: getattr(config.scheduler_config, "watermark", 0.0) > 0,
    ),
    Feature(
        "a cadence of prefills",
        "--prefill-schedule-interval",
        "leave it at 1, because the recipe decides when prompts run",
        lambda config: getattr(config.scheduler_config, "prefill_schedule_interval", 1) > 1,
    ),
)


def check_features(config: Any) -> None:
    """Raise `ConfigError` if a `VllmConfig` uses a feature of `REFUSED`."""
    for feature in REFUSED:
        if feature.is_on(config):
            raise ConfigError(
                f"the Skipjoin scheduler does not support {feature.name} ({feature.flag}): {feature.remedy}"
            )
    if is_chosen(config):
        TierOptions.read(config)


def chooses_scheduler(config: Any) -> bool:
    """Return whether a `VllmConfig` names Skipjoin's scheduler."""
    chosen = config.scheduler_config.scheduler_cls
    name = chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}" if chosen else ""
    return name in SCHEDULERS


def check_tier(config: Any) -> None:
    """Raise `ConfigError` if a `VllmConfig` has the CPU tier with another scheduler, which would not use it."""
    if is_chosen(config) and not chooses_scheduler(config):
        raise ConfigError("--kv-transfer-config: CpuTier needs --scheduler-cls skipjoin.vllm.Scheduler")


def check_kv_groups(kv_cache_config: Any) -> None:
    """Raise `ConfigError` unless all layers share one pool of blocks of attention KV."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or getattr(kv_cache_config, "has_mamba_layers", False):
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups})) or "none"
        raise ConfigError(
            f"the Skipjoin scheduler needs one KV cache group, got {len(groups)} ({kinds}): set "
            "--disable-hybrid-kv-cache-manager, or choose a model whose layers all have full attention"
        )


def check_attributes(owner: Any, names: tuple[str, ...], version: str) -> None:
    """Raise `ConfigError` naming the attributes that `owner` lacks."""
    lacks = list(missing(owner, names))
    if lacks:
        raise ConfigError(
            f"vLLM {version} lacks {', '.join(lacks)}, which the Skipjoin scheduler uses: install one of "
            f"{', '.join(TESTED)}"
        )


def missing(owner: Any, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that `owner` lacks."""
    for name in names:
        if not any(_has(owner, choice) for choice in name.split("|")):
            yield name.replace("|", " or ")


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True
