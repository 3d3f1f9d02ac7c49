from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from skipjoin.adapters import configured
from skipjoin.config import ConfigError, EngineConfig, bytes_per_s
from skipjoin.config.profile import ProfileKey
from skipjoin.core.step import StateSizes
from skipjoin.engine.profiling.profiler import profile_key
from skipjoin.engine.sizing import cpu_blocks, device_blocks, state_sizes
from skipjoin.exec.base import LargestStep, RankError
from skipjoin.exec.graphs import graph_batch_sizes
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.rank_model import LoadedRank, OnProgress, RankModel
from skipjoin.exec.rank_spec import MemoryBudget, ModelExecutor, RankSpec, free_ram, memory_budget_of, rank_spec_of
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import AdapterError
from skipjoin.model.folder import model_files, model_folder
from skipjoin.model.grammars import grammars_of
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import planned_model, read_config
from skipjoin.model.ops.build import must_compile
from skipjoin.model.ops.threads import default_threads
from skipjoin.model.parallel import Shard, check_shards
from skipjoin.model.weight_files import ModelFiles
from skipjoin.version import VERSION

if TYPE_CHECKING:
    from skipjoin.exec.ranks.ranks import RankedExecutor

_GIB = 1 << 30


class Loaded(NamedTuple):
    """A loaded model. The caller of `load` closes the executor."""

    folder: Path
    config: ModelConfig
    executor: ModelExecutor
    max_len: int
    key: ProfileKey


class _Pools(NamedTuple):
    device_blocks: int
    cpu_blocks: int
    states: StateSizes | None


def check_load(config: EngineConfig) -> tuple[ModelConfig, int]:
    """Raise what `load` raises that is known without the weights. Return the model's configuration and context."""
    files, spec = model_files(config.model, config.load_format), _load_spec(config)
    model_config = read_config(files, spec)
    max_len = _max_model_len(config, model_config)
    for chunk in model_config.chunks:
        if chunk < max_len and chunk % config.block_size:
            raise ConfigError(
                f"{model_config.architecture} attends within chunks of {chunk} tokens, so that block_size must divide "
                f"{chunk}; got {config.block_size}"
            )
    check_shards(model_config, config.tensor_parallel_size, config.pipeline_parallel_size)
    if config.lora_modules:
        _adapter_bytes(config, planned_model(files, model_config, spec))
    if config.is_distributed and model_config.states is not None:
        raise ConfigError(
            f"{model_config.architecture}, whose layers have states, runs in this process only: leave "
            "distributed_executor_backend auto"
        )
    if config.ray_address is None:
        _check_memory(config, spec, files, model_config, max_len)
    return model_config, max_len


def _adapter_bytes(config: EngineConfig, model: CausalLM) -> int:
    """Return the memory of the configured adapters; raise `AdapterError` if one is not of this model."""
    total = 0
    for name, folder in config.lora_modules.items():
        try:
            total += model.adapters.planned_bytes(folder)
        except AdapterError as error:
            raise AdapterError(f"adapter {name}: {error}") from error
    return total


def _check_memory(
    config: EngineConfig, spec: LoadSpec, files: ModelFiles, model_config: ModelConfig, max_len: int
) -> None:
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    models = [planned_model(files, model_config, spec, Shard.of_rank(rank, *sizes)) for rank in range(config.ranks)]
    if config.ranks > 1 and models[0].device.type == "cuda":
        return  # each rank has a GPU of its own
    threads = default_threads(config.threads)
    specs = [rank_spec_of(model, config.block_size, threads, config.swap_dtype) for model in models]
    total = sum(spec.weight_bytes for spec in specs)
    budgets = [
        memory_budget_of(
            model,
            config.gpu_memory_utilization,
            config.ranks,
            to_load=spec.weight_bytes + _adapter_bytes(config, model),
        )
        for model, spec in zip(models, specs, strict=True)
    ]
    if models[0].device.type == "cpu" and total > (free := free_ram()):
        raise ConfigError(
            f"the weights of {config.model} need {total / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB of memory are free: "
            "end other programs, choose a smaller model, or set dtype bfloat16 or quantization int8"
        )
    _pools(config, model_config, specs, budgets, max_len)


def load(config: EngineConfig, on_progress: OnProgress = lambda what, share: None) -> Loaded:
    if must_compile():
        on_progress("compiling CPU operations, once per machine", 0.0)
    model_config, max_len = check_load(config)
    folder = model_folder(config.model, config.load_format)
    of = RankModel(
        str(folder),
        _load_spec(config),
        LargestStep(_largest_step(config, model_config, max_len), config.max_num_seqs, max_len),
        config.block_size,
        threads=config.threads,
        swap_dtype=config.swap_dtype,
        link_bytes_per_s=bytes_per_s(config.swap_bandwidth_gbps),
        gpu_share=config.gpu_memory_utilization,
        graph_sizes=() if config.enforce_eager else tuple(graph_batch_sizes(config.max_num_seqs)),
        adapters=configured(config.lora_modules),
    )
    executor: ModelExecutor = (_load_ranks if config.is_distributed else _load_here)(
        config, model_config, of, max_len, on_progress
    )
    key = profile_key(config.model, model_config, executor.rank_specs, VERSION)
    return Loaded(folder, model_config, executor, max_len, key)


def _largest_step(config: EngineConfig, model: ModelConfig, max_len: int) -> int:
    """Return the maximum tokens of a step. A prompt of an encoder is not cut, and may need a step of its own."""
    return max(config.max_num_batched_tokens, max_len) if model.is_encoder else config.max_num_batched_tokens


def _load_spec(config: EngineConfig) -> LoadSpec:
    return LoadSpec(**{field.name: getattr(config, field.name) for field in fields(LoadSpec)})


def _load_here(
    config: EngineConfig, model_config: ModelConfig, of: RankModel, max_len: int, on_progress: OnProgress
) -> LocalExecutor:
    grammars = grammars_of(of.folder, ModelConfig.from_folder(of.folder))
    # Takes a second for a large vocabulary, with the GIL for most of it.
    loading = Thread(target=grammars.load, daemon=True)
    loading.start()
    rank = LoadedRank(of, default_threads(config.threads), on_progress)
    try:
        pools = _pools(config, model_config, (rank.spec,), (rank.budget,), max_len)
        rank.make_pools(pools.device_blocks, pools.cpu_blocks, pools.states)
    except RankError as error:
        raise ConfigError(str(error)) from error
    loading.join()
    # On a CPU, nothing runs well beside the model, which computes on all cores.
    is_deferred = rank.model.device.type == "cpu" and config.plans_in_flight("cpu") == 1
    return LocalExecutor(
        rank.model, rank.store, threads=rank.threads, graphs=rank.graphs, grammars=grammars, is_deferred=is_deferred
    )


def _load_ranks(
    config: EngineConfig, model_config: ModelConfig, of: RankModel, max_len: int, on_progress: OnProgress
) -> RankedExecutor:
    # Imported lazily: an engine in one process needs no packages of ranks.
    from skipjoin.exec.ranks.cluster import Cluster, ClusterError  # noqa: PLC0415
    from skipjoin.exec.ranks.launch import GroupSizes, Launcher  # noqa: PLC0415
    from skipjoin.exec.ranks.own_ranks import OwnLauncher  # noqa: PLC0415
    from skipjoin.exec.ranks.ranks import RankedExecutor  # noqa: PLC0415
    from skipjoin.exec.ranks.ray_ranks import RayLauncher  # noqa: PLC0415

    def launcher() -> Launcher:
        if not config.is_on_ray:
            return OwnLauncher()
        address = config.ray_address
        on_progress("starting Ray" if address is None else "joining Ray", 0.0)
        return RayLauncher(Cluster.start(config.ranks) if address is None else Cluster.join(address))

    try:
        return RankedExecutor(
            of,
            GroupSizes(config.tensor_parallel_size, config.pipeline_parallel_size),
            lambda rank_specs, budgets: _pools(config, model_config, rank_specs, budgets, max_len)[:2],
            launcher=launcher(),
            max_restarts=config.max_restarts,
            on_progress=on_progress,
        )
    except (ClusterError, RankError) as error:
        raise ConfigError(str(error)) from error


def _pools(
    config: EngineConfig,
    model: ModelConfig,
    rank_specs: Sequence[RankSpec],
    budgets: Sequence[MemoryBudget],
    max_len: int,
) -> _Pools:
    states, size = state_sizes(config, rank_specs[0], budgets[0]), rank_specs[0].state_bytes
    here, there = (0, 0) if states is None else (states.device + states.snapshots, states.cpu)
    # A vector counts as one token, which follows a prompt of the whole context.
    blocks = device_blocks(config, rank_specs, budgets, max_len + (model.pooling is not None), here * size)
    spare = 0 if model.is_encoder else cpu_blocks(config, rank_specs, budgets, blocks, there * size)
    return _Pools(blocks, spare, states)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    most = model.max_positions
    if config.max_model_len is None:
        usual = None if model.pooling is None else model.pooling.max_tokens
        return most if usual is None else min(most, usual)
    if config.max_model_len > most:
        raise ConfigError(f"max_model_len must be at most the model's {most} positions, got {config.max_model_len}")
    return config.max_model_len
