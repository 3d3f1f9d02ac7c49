from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from skipjoin.options import ConfigError
from skipjoin.vllm.tier_options import TierOptions, is_chosen

# Releases for which the contract tests have passed; see docs/reference/vllm.md.
TESTED = ("0.27.1", "0.30.0", "0.32.0", "0.33.0")
_MISSING = object()
# Names of the scheduler in `--scheduler-cls`.
SCHEDULERS = ("skipjoin.vllm.Scheduler", "skipjoin.vllm.scheduler.Scheduler")


class Call(NamedTuple):
    positional: int = 0
    keywords: tuple[str, ...] = ()

    def why_not(self, method: Any) -> str | None:
        """Return what a bound method takes instead of these arguments, or None if it takes them."""
        if not callable(method):
            return f"is of type {type(method).__name__} instead of a method"
        signature = inspect.signature(method)
        try:
            signature.bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError:
            given = ", ".join([*["..."] * self.positional, *(f"{name}=..." for name in self.keywords)])
            return f"takes {signature} instead of ({given})"
        return None


class Value(NamedTuple):
    types: tuple[type, ...]

    def why_not(self, value: Any) -> str | None:
        if isinstance(value, self.types):
            return None
        return f"is of type {type(value).__name__} instead of {' or '.join(type_.__name__ for type_ in self.types)}"


# What the scheduler uses, by path. Of two paths with a bar between them, one must exist.
Uses = Mapping[str, Call | Value]
METHODS: Uses = {
    "schedule": Call(),
    "update_from_output": Call(2),
    "add_request": Call(1),
    "finish_requests": Call(2),
    "reset_prefix_cache": Call(1),
    "shutdown": Call(),
    "_preempt_request": Call(2),
    "_is_blocked_waiting_status": Call(1),
    "_handle_blocked_waiting_request|_try_promote_blocked_waiting_request": Call(1),
}
# Also used where a release has them.
OPTIONAL: Uses = {"_reserve_prefill_lookahead": Call(3)}
# Attributes of instances.
STATE: Uses = {
    "requests": Value((dict,)),
    "running": Value((list,)),
    "waiting.add_request": Call(1),
    "waiting.remove_request": Call(1),
    "kv_holding_waiting.add_request|skipped_waiting.add_request": Call(1),
    "reset_preempted_req_ids": Value((set,)),
    "grammar_compile_error_reqs": Value((set, dict)),
    "scheduler_reserve_full_isl": Value((bool,)),
    "defer_block_free": Value((bool,)),
    "max_num_running_reqs": Value((int,)),
    "max_num_scheduled_tokens": Value((int,)),
    "max_model_len": Value((int,)),
    "num_spec_tokens": Value((int,)),
    "connector": Value((object,)),
    "encoder_cache_manager.free": Call(1),
    "_pause_state": Value((object,)),
    "kv_cache_manager.allocate_slots": Call(2, ("delay_cache_blocks",)),
    "kv_cache_manager.get_block_ids": Call(1),
    "kv_cache_manager.get_computed_blocks": Call(1),
    "kv_cache_manager.block_pool.get_num_free_blocks": Call(),
    "kv_cache_manager.block_pool.num_gpu_blocks": Value((int,)),
    "kv_cache_manager.coordinator.single_type_managers": Value((tuple, list)),
}
# Attributes of each KV cache group's manager.
GROUP: Uses = {
    "block_size": Value((int,)),
    "kv_cache_spec": Value((object,)),
    "req_to_blocks": Value((dict,)),
    "get_num_skipped_tokens": Call(1),
}
# Kinds of layers that may have groups of their own.
KV_KINDS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec")


class Feature(NamedTuple):
    """Feature of vLLM that the scheduler refuses, with its flag and a remedy."""

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
        "speculative decoding but by n-grams",
        "--speculative-config",
        "set its method to ngram, or leave it out",
        lambda config: config.speculative_config is not None and config.speculative_config.method != "ngram",
    ),
    Feature(
        "drafts beside a CPU tier",
        "--speculative-config and --kv-transfer-config",
        "leave one of them out",
        lambda config: config.speculative_config is not None and config.kv_transfer_config is not None,
    ),
    Feature(
        "drafts or a CPU tier of recurrent models",
        "--speculative-config and --kv-transfer-config",
        "leave them out",
        lambda config: (
            getattr(config.model_config, "has_inner_state", False)
            and (config.speculative_config is not None or config.kv_transfer_config is not None)
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
        "sparse attention over a pool on the host",
        "--attention-config",
        "leave hisparse_config out",
        lambda config: getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None,
    ),
    Feature(
        "auxiliary outputs",
        "--aux-output-config",
        "leave it out",
        lambda config: getattr(getattr(config, "aux_output_config", None), "enabled", False),
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
    for feature in REFUSED:
        if feature.is_on(config):
            raise ConfigError(
                f"the Skipjoin scheduler does not support {feature.name} ({feature.flag}): {feature.remedy}"
            )
    if is_chosen(config):
        TierOptions.read(config)


def chooses_scheduler(config: Any) -> bool:
    chosen = config.scheduler_config.scheduler_cls
    name = chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}" if chosen else ""
    return name in SCHEDULERS


def check_kv_groups(kv_cache_config: Any, *, has_tier: bool) -> None:
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    unknown = set(kinds) - set(KV_KINDS) if len(groups) > 1 else set[str]()
    if not groups or unknown:
        raise ConfigError(
            f"the Skipjoin scheduler needs layers with full or sliding-window attention or recurrent ones, got "
            f"{', '.join(kinds) or 'none'}: choose another model"
        )
    if has_tier and (len(groups) > 1 or "SlidingWindowSpec" in kinds):
        raise ConfigError(
            f"--kv-transfer-config: CpuTier needs one KV cache group of full attention, got {len(groups)} "
            f"({', '.join(kinds)}): set --disable-hybrid-kv-cache-manager, or leave it out"
        )


def check_attributes(owner: Any, uses: Uses, version: str) -> None:
    """Raise `ConfigError` if attributes of an object, or methods of a class, are missing or of another form."""
    lacks, differs = [], []
    for paths, use in uses.items():
        found, value = _find(owner, paths.split("|"))
        if found is None:
            lacks.append(paths.replace("|", " or "))
        elif (why := use.why_not(value)) is not None:
            differs.append(f"{found} {why}")
    problems = [f"vLLM {version} lacks {', '.join(lacks)}"] if lacks else []
    problems += [f"in vLLM {version}, {'; '.join(differs)}"] if differs else []
    if problems:
        raise ConfigError(f"{'; '.join(problems)}, which the Skipjoin scheduler uses: {remedy()}")


def remedy() -> str:
    return f"install one of {', '.join(TESTED)}"


def _find(owner: Any, paths: Sequence[str]) -> tuple[str | None, Any]:
    for path in paths:
        value = owner
        for name in path.split("."):
            is_function = isinstance(value, type) and inspect.isfunction(inspect.getattr_static(value, name, None))
            if (value := getattr(value, name, _MISSING)) is _MISSING:
                break
            value = partial(value, None) if is_function else value
        else:
            return path, value
    return None, None
